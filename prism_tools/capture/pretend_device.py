"""The pretended CUDA devices: which is current, and streams and events that are never behind (capture/pretend_cuda.py)."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace
from typing import Any

import torch

CPU = torch.device("cpu")
NAME = "pretended CUDA device"
CAPABILITY = (8, 0)  # an A100's: newer ones let programs choose 8-bit floats, and kernels that no CPU has
MEMORY = 80 << 30  # bytes

_place = threading.local()  # of this thread: ``device`` (an index), ``stream``
_home: int | None = None  # the device that the program chose for this rank


def device_count() -> int:
    """As many as a node has ranks."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def current_device() -> int:
    """Index of the current device of this thread."""
    return getattr(_place, "device", 0)


def set_device(device: Any) -> None:
    """RuntimeError if there is no such device, as CUDA's."""
    global _home
    index = index_of(device)
    if index >= device_count():
        raise RuntimeError(f"CUDA error: invalid device ordinal (prism: {index} of {device_count()} pretended devices)")
    _place.device = _home = index


def index_of(device: Any = None) -> int:
    """Index of ``device``: a number, a torch.device, its name, or None for the current one."""
    if isinstance(device, str):
        device = torch.device(device)
    index = device.index if isinstance(device, torch.device) else device
    return current_device() if index is None or index < 0 else index


def on_cpu(device: Any) -> Any:
    """The CPU for a CUDA device, however it is written; anything else as it is."""
    if isinstance(device, torch.device):
        return CPU if device.type == "cuda" else device
    return "cpu" if isinstance(device, str) and (device == "cuda" or device.startswith("cuda:")) else device


def is_child() -> bool:
    """Whether this is a child that the rank forked, such as a loader's worker, which could use no CUDA: its tensors say so."""
    return os.getpid() != os.getpgid(0)


def told(device: torch.device) -> torch.device:
    """What a program is told about the device of a tensor that is on ``device``: the rank's one, in all threads."""
    if device.type != "cpu" or is_child():
        return device
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) if _home is None else _home)


def properties(device: Any = None) -> SimpleNamespace:
    """What programs read of torch.cuda.get_device_properties."""
    major, minor = CAPABILITY
    return SimpleNamespace(
        name=NAME, major=major, minor=minor, total_memory=MEMORY, multi_processor_count=108, warp_size=32
    )


class DeviceBlock:
    """``with torch.cuda.device(n)``: the current device of a block."""

    def __init__(self, device: Any) -> None:
        self.idx = index_of(device.device if isinstance(device, torch.Tensor) else device)

    def __enter__(self) -> None:
        self.prev_idx, _place.device = current_device(), self.idx

    def __exit__(self, *_: object) -> None:
        _place.device = self.prev_idx


class Stream:
    """A queue of work that is done when it is issued; as a block (torch.cuda.stream), the current stream."""

    cuda_stream = native_handle = stream_id = priority = 0

    def __init__(self, device: Any = None, *_: Any, **__: Any) -> None:
        self.device_index = index_of(device)
        self.device = torch.device("cuda", self.device_index)
        self._before: list[Stream] = []

    def __enter__(self) -> Stream:
        self._before.append(current_stream())
        set_stream(self)
        return self

    def __exit__(self, *_: object) -> None:
        set_stream(self._before.pop())

    def wait_stream(self, stream: Any) -> None:
        """What ``stream`` was given is done."""

    def wait_event(self, event: Any) -> None:
        """It has happened."""

    def record_event(self, event: Any = None) -> Any:
        return event or Event()

    def synchronize(self) -> None:
        """Nothing is under way."""

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False


class Event:
    """A point in a stream that has been reached. How long a device would have worked is not known: 0 ms."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = torch.device("cuda", current_device())

    def record(self, stream: Any = None) -> None:
        """It has happened."""

    wait = record

    def synchronize(self) -> None:
        """It has happened."""

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Any) -> float:
        return 0.0


DEFAULT_STREAM = Stream(0)


def current_stream(device: Any = None) -> Stream:
    """The stream that this thread is in."""
    return getattr(_place, "stream", DEFAULT_STREAM)


def set_stream(stream: Stream | None) -> None:
    """None changes nothing, as torch's."""
    if stream is not None:
        _place.stream = stream


class Generators:
    """``torch.cuda.default_generators``: all random numbers come from the CPU's generator."""

    def __getitem__(self, index: int) -> torch.Generator:
        return torch.default_generator

    def __len__(self) -> int:
        return device_count()


class _GeneratorMeta(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch._C.Generator)


class GeneratorName(metaclass=_GeneratorMeta):
    """Stands for ``torch.Generator``: those of a CUDA device are the CPU's."""

    def __new__(cls, device: Any = CPU) -> Any:
        return torch._C.Generator(on_cpu(device))
