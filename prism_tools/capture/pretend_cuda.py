"""A stand-in for ``torch.cuda`` in a rank without GPUs: a program that asks for CUDA devices runs on the CPU (design §5).

Tensors are the CPU's. A mode in front of torch's functions answers for them: a device that is asked for becomes the CPU, a
device that is told is a CUDA device. What takes no tensors (streams, memory, generators, autocast) is replaced by name, from
the tables here; what they do not name behaves as in a torch without CUDA.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.overrides import TorchFunctionMode

from prism_tools.capture import pretend_nccl
from prism_tools.capture.pretend_device import (
    CAPABILITY,
    CPU,
    DEFAULT_STREAM,
    MEMORY,
    NAME,
    DeviceBlock,
    Event,
    GeneratorName,
    Generators,
    Stream,
    current_device,
    current_stream,
    device_count,
    is_child,
    on_cpu,
    properties,
    set_device,
    set_stream,
    told,
)

TENSOR_TYPES = ("Float", "Double", "Half", "BFloat16", "Byte", "Char", "Short", "Int", "Long", "Bool")


def _answer(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


def _each(names: str, value: Any) -> dict[str, Any]:
    return dict.fromkeys(names.split(), value)


def _seed(number: int) -> None:
    torch.default_generator.manual_seed(int(number))  # torch.manual_seed would come back here


RANDOM = {
    **_each("manual_seed manual_seed_all", _seed),
    **_each("seed seed_all", lambda: torch.default_generator.seed()),
    "initial_seed": lambda: torch.default_generator.initial_seed(),
    "get_rng_state": lambda *_, **__: torch.get_rng_state(),
    "get_rng_state_all": lambda: [torch.get_rng_state() for _ in range(device_count())],
    "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
    "set_rng_state_all": lambda states: torch.set_rng_state(states[current_device()]),
}
MEMORY_FIGURES = {
    **_each("memory_allocated max_memory_allocated memory_reserved max_memory_reserved", _answer(0)),
    **_each("memory_cached max_memory_cached", _answer(0)),
    **_each("memory_stats memory_stats_as_nested_dict host_memory_stats", lambda *_, **__: {}),
    **_each("reset_peak_memory_stats reset_max_memory_allocated reset_max_memory_cached", _answer(None)),
    **_each("reset_accumulated_memory_stats set_per_process_memory_fraction empty_cache", _answer(None)),
    "memory_summary": _answer(""),
    "memory_snapshot": lambda *_, **__: [],
    "mem_get_info": _answer((MEMORY, MEMORY)),
}
STREAMS = {
    "current_stream": current_stream,
    "set_stream": set_stream,
    "synchronize": _answer(None),
    "device_count": device_count,
    "is_available": _answer(True),
}
CUDA = {
    **RANDOM,
    **MEMORY_FIGURES,
    **STREAMS,
    **{f"{name}Tensor": getattr(torch, f"{name}Tensor") for name in TENSOR_TYPES},
    **_each("init _lazy_init ipc_collect set_sync_debug_mode", _answer(None)),
    **_each("utilization memory_usage temperature power_draw clock_rate get_sync_debug_mode", _answer(0)),
    **_each("is_initialized is_bf16_supported can_device_access_peer _is_compiled", _answer(True)),
    **_each("Stream ExternalStream", Stream),
    **_each("device device_of", DeviceBlock),
    **_each("stream StreamContext", lambda stream: stream or contextlib.nullcontext()),
    "Event": Event,
    "default_stream": _answer(DEFAULT_STREAM),
    "default_generators": Generators(),
    "current_device": current_device,
    "set_device": set_device,
    "get_device_name": _answer(NAME),
    "get_device_capability": _answer(CAPABILITY),
    "get_device_properties": properties,
    "get_arch_list": lambda: ["sm_{}{}".format(*CAPABILITY)],
    "is_current_stream_capturing": _answer(False),
    "_lazy_call": lambda call, **_: call(),
}
ACCELERATOR = {
    **STREAMS,
    **_each("current_device_index current_device_idx", current_device),
    **_each("set_device_index set_device_idx", set_device),
    "current_accelerator": lambda *_, **__: torch.device("cuda"),
    "empty_cache": _answer(None),
}


_T = torch._C.TensorBase


def _to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """To a CUDA device: the tensor itself. To the CPU by name: a copy, which later changes on the device do not reach."""
    target = kwargs.get("device", args[0] if args else None)
    if isinstance(target, (str, torch.device)) and torch.device(target).type == "cpu" and not is_child():
        kwargs["copy"] = True
    if "device" in kwargs:
        kwargs["device"] = _asked(target)
    elif args:
        args = (_asked(target), *args[1:])
    return _T.to(tensor, *args, **kwargs)


def _type(tensor: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
    if dtype is None:  # the mode, which C asks, comes back here: that answer has the word already
        return _T.type(tensor).replace("torch.cuda.", "torch.").replace("torch.", "torch.cuda.")
    return _T.type(tensor, dtype.replace("torch.cuda.", "torch.") if isinstance(dtype, str) else dtype, *args, **kwargs)


def _wrapper(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
    """A tensor of a subclass that wraps one of the CPU's, such as a result of communication that goes on."""
    return _T._make_wrapper_subclass(*args, device=_asked(device), **kwargs)


# By name, because the mode is off while torch's own code runs, and with it hooks of the program, such as of saved tensors.
TENSOR = {
    "to": _to,
    "type": _type,
    "cpu": lambda tensor, *_, **__: _to(tensor, CPU),
    "cuda": lambda tensor, *_, **__: tensor,
    "pin_memory": lambda tensor, *_, **__: tensor,
    "record_stream": _answer(None),
    "get_device": lambda tensor: tensor.device.index,
    "_make_wrapper_subclass": staticmethod(_wrapper),
    "device": property(lambda tensor: told(_T.device.__get__(tensor))),
    "is_cuda": property(lambda tensor: told(_T.device.__get__(tensor)).type == "cuda"),
    "is_cpu": property(lambda tensor: told(_T.device.__get__(tensor)).type == "cpu"),
}
TABLES = {
    "cuda": CUDA,
    "cuda.random": RANDOM,
    "cuda.memory": MEMORY_FIGURES,
    "cuda.streams": {"Stream": Stream, "Event": Event},
    "cuda.nvtx": _each("range_push range_pop range_start range_end mark", _answer(0)),
    "cuda.nccl": {"version": _answer((2, 28, 9)), "is_available": _answer(True)},
    "accelerator": ACCELERATOR,
    "distributed.tensor._random": {"is_rng_supported_mesh": _answer(False)},  # whose states are of CUDA's generators
    "distributed.tensor._dispatch": {"is_rng_supported_mesh": _answer(False)},
    "version": {"cuda": torch.version.cuda or "13.0"},
    "": {"Stream": Stream, "Event": Event, "Generator": GeneratorName},
    "Tensor": TENSOR,
    "backends.cudnn": {"is_acceptable": _answer(False)},
    "_C": {"_get_accelerator": _answer(torch.device("cuda"))},
}
# Functions of torch that are told a device, but no tensor.
TAKE_DEVICE = (
    "get_autocast_dtype",
    "load",
    "set_autocast_dtype",
    "set_autocast_enabled",
    "set_default_device",
)


class CudaOnCpu(TorchFunctionMode):
    """In front of every function of torch: a CUDA device among its arguments is the CPU."""

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function is torch.device:
            return torch.device(*(("cuda", *args) if args and type(args[0]) is int else args), **(kwargs or {}))
        if kwargs:
            kwargs = dict(kwargs)
            if "device" in kwargs:
                kwargs["device"] = _asked(kwargs["device"])
            kwargs.pop("pin_memory", None)
        return function(*map(on_cpu, args), **(kwargs or {}))


def _asked(device: Any) -> Any:
    return CPU if type(device) is int else on_cpu(device)


def install() -> None:
    """Before the user's program, and for good: torch.cuda, the mode in this and all later threads, and the backend "nccl"."""
    patch()
    CudaOnCpu().__enter__()


@functools.cache
def patch() -> None:
    """What is replaced by name; once, in this process or in the one that it was forked from."""
    for path, table in TABLES.items():
        module = functools.reduce(getattr, path.split(".") if path else (), torch)
        for name, value in table.items():
            setattr(module, name, value)
    for name in TAKE_DEVICE:
        setattr(torch, name, _redirected(getattr(torch, name)))
    _install_autocast()
    torch.compiler.set_stance("force_eager")  # code for a device is not what a CPU would run, nor what a graph holds
    threading.Thread._bootstrap_inner = _in_mode(threading.Thread._bootstrap_inner)  # type: ignore[attr-defined]
    # A mode is off while it answers, so in Tensor.backward, but hooks and backward functions are the program's.
    torch.autograd._engine_run_backward = _in_mode(torch.autograd._engine_run_backward)  # type: ignore[attr-defined]
    # So is what operators of Python run in, such as flex_attention's scores.
    HigherOrderOperator.dispatch = _in_mode(HigherOrderOperator.dispatch)  # type: ignore[method-assign]
    pretend_nccl.install()


def _in_mode(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with CudaOnCpu():
            return function(*args, **kwargs)

    return run


def _redirected(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def on_the_cpu(*args: Any, **kwargs: Any) -> Any:
        return function(*map(on_cpu, args), **{name: on_cpu(value) for name, value in kwargs.items()})

    return on_the_cpu


def _install_autocast() -> None:
    """CUDA's autocast is the CPU's, with CUDA's default type; which operations are cast is the CPU's choice."""
    autocast = torch.amp.autocast_mode.autocast
    autocast.__init__ = _redirected(autocast.__init__)  # type: ignore[method-assign]
    torch.set_autocast_dtype("cpu", torch.float16)
    is_enabled = torch.is_autocast_enabled
    torch.is_autocast_enabled = lambda device_type="cuda": is_enabled(on_cpu(device_type))
    torch.get_autocast_gpu_dtype = lambda: torch.get_autocast_dtype("cpu")
