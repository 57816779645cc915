"""The traced process group and the names of torch.distributed that it stands for (design §4).

``distributed_c10d.ProcessGroup`` becomes TracedGroup: DDP's reducer, functional collectives, DTensor, FSDP2 and pipelining all
come through it. Behind it is either the real group (every output bit-equal) or the server that plays the absent ranks.
In front of the real group all calls but the operations are the real group's own.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import ProcessGroup

from prism_tools.capture import session as active
from prism_tools.capture.calls import METHODS, Call, device_of, is_sync
from prism_tools.capture.work import RealWork, TracedWork
from prism_tools.graph.schema import Op

if TYPE_CHECKING:
    from prism_tools.capture.live import Coalescing

RealGloo = c10d.ProcessGroupGloo
# Real groups live as long as the process: torch destroys them holding the interpreter's lock, and their destructor joins
# threads that may wait for that lock.
kept: list[Any] = []


class AbsentBackend:
    """What Python callers see of the backend of a group that a server plays: the facts about gloo that they branch on.
    ``name``: "gloo", or the backend that is pretended."""

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False
    supports_shrinking = False

    class Options:
        """Fields that torch sets after construction."""

        def __init__(self) -> None:
            self.global_ranks_in_group: list[int] = []
            self.group_name = ""

    def __init__(self, name: str = "gloo") -> None:
        self.options = self.Options()
        self._name = name

    def name(self) -> str:
        return self._name

    def _set_sequence_number_for_group(self) -> None:
        """Nothing to agree on: the server numbers operations."""


class _GlooMeta(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, (RealGloo, AbsentBackend))


class GlooName(metaclass=_GlooMeta):
    """Stands for ``ProcessGroupGloo``: the real one for groups wholly in this sandbox, else nothing that connects."""

    name: Callable[[], str]  # of what passes for an instance
    Options = getattr(RealGloo, "Options", None)
    _Options = getattr(RealGloo, "_Options", None)
    create_device = staticmethod(RealGloo.create_device)
    create_default_device = staticmethod(RealGloo.create_default_device)

    def __new__(cls, store: Any, rank: int, size: int, *args: Any, **kwargs: Any) -> Any:
        if active.SESSION.is_remote(active.SESSION.pending_ranks):
            return AbsentBackend()
        group = RealGloo(store, rank, size, *args, **kwargs)
        kept.append(group)
        return group


class TracedGroup(ProcessGroup):
    """A process group whose every operation is a node. Only ProcessGroup(rank, size) can be subclassed: a plain inner
    group owns the store, and both hold the same real backends."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        ProcessGroup.__init__(self, rank, size)
        self._store = store
        self._session = active.SESSION
        self._ranks = self._session.pending_ranks or tuple(range(size))
        if self._session.announces_groups and self._ranks[rank] != self._session.rank:
            raise RuntimeError("prism: the program numbers its ranks otherwise than its launcher does (RANK)")
        self.played = self._session.is_remote(self._ranks)
        self._inner = None if self.played else ProcessGroup(store, rank, size)
        self._absent = AbsentBackend()
        self.backend_name = "gloo"
        self._devices: list[torch.device] = []
        self._label = ""
        self._description = ""
        self._bound: torch.device | None = None
        self._slots: dict[str, int] = {}
        self._backends: dict[str, str] = {}
        self._coalescing: Coalescing | None = None
        self._on_device = False  # all its operations run on a device

    def slot(self, backend: str = "") -> int:
        """This group's number in the rank's own list, one for each backend; registered on first use."""
        backend = backend or self.backend_name
        slot = self._slots.get(backend, -1)
        if slot < 0:
            slot = self._slots[backend] = self._session.register(self._label, self._description, backend, self._ranks)
        return slot

    def backend_of(self, device: str) -> str:
        """The real backend of tensors on this type of device: "gloo", "nccl", …"""
        name = self._backends.get(device)
        if name is None:
            assert self._inner is not None
            name = self._backends[device] = self._inner._get_backend(torch.device(device)).name().lower()
            self._on_device = name != "gloo" and [kind.type for kind in self._inner._device_types] == ["cuda"]
        return name

    def preferred_device(self) -> str:
        """The type of device of an operation without tensors."""
        return next((d.type for d in self._device_types if d.type != "cpu"), "cpu")

    def _register_backend(self, device: Any, kind: Any, backend: Any) -> None:
        self._devices.append(torch.device(device))
        if isinstance(backend, GlooName):
            self.backend_name = backend.name()
        if self._inner is not None:
            ProcessGroup._register_backend(self, device, kind, backend)
            self._inner._register_backend(device, kind, backend)

    def _set_default_backend(self, kind: Any) -> None:
        if (
            self._inner is not None
        ):  # without a backend, torch 2.14's C++ must not look for one to ask for rank and size
            ProcessGroup._set_default_backend(self, kind)
            self._inner._set_default_backend(kind)

    def _set_group_name(self, name: str) -> None:
        self._label = str(name)
        ProcessGroup._set_group_name(self, name)
        if self._inner is not None:
            self._inner._set_group_name(name)

    def _set_group_desc(self, description: str) -> None:
        self._description = str(description)
        ProcessGroup._set_group_desc(self, description)
        if self._inner is not None:
            self._inner._set_group_desc(description)
        if self._session.announces_groups:  # the last step of torch's helper: name and ranks are known
            self.slot()

    def get_group_store(self) -> Any:
        return self._store

    @property
    def group_name(self) -> str:
        return self._label

    @property
    def group_desc(self) -> str:
        return self._description

    @property
    def bound_device_id(self) -> torch.device | None:
        return self._bound

    @bound_device_id.setter
    def bound_device_id(self, device: torch.device | None) -> None:
        self._bound = device
        if self._inner is not None:
            ProcessGroup.bound_device_id.__set__(self, device)  # type: ignore[attr-defined]
            self._inner.bound_device_id = device

    @property
    def _device_types(self) -> list[torch.device]:
        return self._devices[::-1] if self._inner is None else self._inner._device_types

    def _get_backend(self, device: Any) -> Any:
        return self._absent if self._inner is None else self._inner._get_backend(device)

    def getBackendName(self) -> str:  # noqa: N802 - the C++ name: torch's DDP logger casts a "gloo" to its own class
        return "prism" if self._inner is None else self._inner.name()

    def name(self) -> str:
        return self.backend_name if self._inner is None else self._inner.name()

    _get_backend_name = name

    def _has_hooks(self) -> bool:
        return self._inner is not None and self._inner._has_hooks()

    def _set_sequence_number_for_group(self) -> None:
        if self._inner is not None:
            self._inner._set_sequence_number_for_group()

    def _get_sequence_number_for_group(self) -> int:
        return 0 if self._inner is None else self._inner._get_sequence_number_for_group()

    def set_timeout(self, timeout: Any) -> None:
        if self._inner is not None:
            self._inner.set_timeout(timeout)

    def shutdown(self) -> None:
        if self._inner is not None:
            self._inner.shutdown()

    def abort(self) -> None:
        if self._inner is not None:
            self._inner.abort()

    def _start_coalescing(self, device: Any = None) -> None:
        if self._inner is None:
            raise RuntimeError(f"Backend {self.backend_name} does not implement startCoalescing")
        if self._session.tracing and device is not None and torch.device(device).type == "cuda":
            self._coalescing = self._session.begin_coalescing()
        self._inner._start_coalescing(device)

    def _end_coalescing(self, device: Any = None) -> Any:
        if self._inner is None:
            return None
        opened, self._coalescing = self._coalescing, None
        try:
            return self._inner._end_coalescing(device)
        finally:
            if opened is not None:
                opened.end()

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        if self._inner is None:
            self.barrier().wait()  # type: ignore[attr-defined]
            return
        session = self._session
        if not session.tracing:
            return self._inner.monitored_barrier(timeout, wait_all_ranks=wait_all_ranks)
        node = session.issue(Call(Op.BARRIER, sync=True), self.slot(self.backend_of("cpu")), monotonic_ns())
        entered = monotonic_ns()
        try:
            self._inner.monitored_barrier(timeout, wait_all_ranks=wait_all_ranks)
        except BaseException:
            session.tracer.withdraw(node)
            raise
        session.tracer.waited(node, entered, True)

    def split_group(self, ranks: Any, *args: Any, **kwargs: Any) -> Any:
        if self._inner is None:
            raise RuntimeError("No backend for the parent process group or its backend does not support splitting")
        made = self._inner.split_group(ranks, *args, **kwargs)
        if made is None:
            return None
        self._session.pending_ranks = tuple(self._ranks[rank] for rank in ranks)
        return TracedGroup.around(made)

    @classmethod
    def around(cls, real: ProcessGroup) -> TracedGroup:
        """The traced group in front of a group that C++ made."""
        group = cls(real.get_group_store(), real.rank(), real.size())
        kind = None
        for device in real._device_types:
            backend = real._get_backend(device)
            kind = getattr(ProcessGroup.BackendType, backend.name().upper(), ProcessGroup.BackendType.CUSTOM)
            group._register_backend(device, kind, backend)
        if kind is not None:
            group._set_default_backend(kind)
        if real.bound_device_id is not None:
            group.bound_device_id = real.bound_device_id
        group._set_group_name(real.group_name)
        group._set_group_desc(real.group_desc)
        return group


def _traced(name: str) -> Any:
    normalise: Callable[..., Call] = METHODS[name]

    def method(self: TracedGroup, *args: Any, **kwargs: Any) -> Any:
        called = monotonic_ns()
        session = self._session
        if not session.tracing:
            return getattr(self._inner, name)(*args, **kwargs)
        try:
            call = normalise(self, *args, **kwargs)
        except Exception:
            if self.played:
                raise
            return session.unknown(name, getattr(self._inner, name), args, kwargs)
        if self.played:
            size = len(self._ranks)
            if call.peer >= size or call.root >= size:
                raise ValueError(f"prism: {name}: no rank {max(call.peer, call.root)} in a group of {size}")
            slot = self.slot()
            node = session.issue(call, slot, called)
            work: TracedWork = session.submit(call, slot, node)
            session.tracer.handed_over(node, call.op, monotonic_ns(), True)
            return work
        real = getattr(self._inner, name)
        device = "cpu" if session.pretends else device_of(call)
        slot = self.slot(self.backend_of(device))
        if device == "cuda" and self._backends[device] != "gloo":
            return session.on_device(self._coalescing, call, slot, called, real, args, kwargs)
        node = session.issue(call, slot, called)
        try:
            result = real(*args, **kwargs)
        except BaseException:
            session.tracer.withdraw(node)
            raise
        returned = monotonic_ns()
        work = RealWork(session, call, node, result)
        session.tracer.handed_over(node, call.op, returned, False)
        return work

    method.__name__ = name
    return method


# Programs print groups, in torch's own errors too: let them read what they would without us.
TracedGroup.__name__, TracedGroup.__qualname__, TracedGroup.__module__ = "ProcessGroup", "ProcessGroup", c10d.__name__


def _quick(name: str, place: int) -> Any:
    """As _traced, for an operation that programs repeat on a device, with its payload at argument ``place``: one that
    looks like the one at the same place in the last iteration is not described again (capture/device.py); reading the
    reduction alone would take longer than all of this."""
    thorough = _traced(name)
    inner = getattr(ProcessGroup, name)

    def method(self: TracedGroup, *args: Any, **kwargs: Any) -> Any:
        called = monotonic_ns()
        device = self._session.device
        if device is None or not self._on_device or len(args) != place + 2 or self._coalescing is not None:
            return thorough(self, *args, **kwargs)
        payload = args[place]
        if not place and type(payload) is list and len(payload) == 1:
            payload = payload[0]
        if not isinstance(payload, torch.Tensor) or payload.device.index != device.index:
            return thorough(self, *args, **kwargs)
        key = (self, name, payload.numel(), payload.dtype)
        self._session.end_iteration()
        if self._session.device is not device:  # the window has ended
            return inner(self._inner, *args, **kwargs)
        with device.lock:
            at, number = len(device.this), len(device.operations)
            known = device.last[at] if at < len(device.last) else None
            if known is not None and known[0] == key:
                device.this.append(known)
                device.operations.append(known[1])
        if known is not None and known[0] == key:
            return device.run(number, known[2], called, inner, (self._inner, *args), kwargs)
        result = thorough(self, *args, **kwargs)
        with device.lock:
            made = device.operations[number] if len(device.operations) > number else None
            if made is not None and made[1][1] == key[2] and len(device.this) == at:
                device.this.append((key, made, is_sync(args[-1])))
        return result

    method.__name__ = name
    return method


_QUICK = {
    "allreduce": 0,
    "_allgather_base": 1,
    "_reduce_scatter_base": 1,
    "all_gather_single": 1,
    "reduce_scatter_single": 1,
}

for _name in METHODS:
    if hasattr(ProcessGroup, _name):
        setattr(TracedGroup, _name, _quick(_name, _QUICK[_name]) if _name in _QUICK else _traced(_name))


def install() -> None:
    """Replace the names. The helper is wrapped because constructors are not told which global ranks they are for."""
    original = c10d._new_process_group_helper

    def helper(size: int, rank: int, global_ranks: list[int], *args: Any, **kwargs: Any) -> Any:
        ranks = active.SESSION.pending_ranks = tuple(global_ranks) or tuple(range(size))
        active.SESSION.made_group(str(kwargs["group_name"] if "group_name" in kwargs else args[2]), ranks)
        if not global_ranks:
            active.SESSION.enter(rank, size)
        return original(size, rank, global_ranks, *args, **kwargs)

    batch = c10d.batch_isend_irecv

    def batch_isend_irecv(operations: list) -> list:
        tracer = active.SESSION.tracer
        tracer.batch, tracer.batches = tracer.batches, tracer.batches + 1
        try:
            return batch(operations)
        finally:
            tracer.batch = -1

    c10d._new_process_group_helper = helper
    c10d.batch_isend_irecv = dist.batch_isend_irecv = batch_isend_irecv
    c10d.ProcessGroup = TracedGroup  # type: ignore[misc]
    c10d.ProcessGroupGloo = dist.ProcessGroupGloo = GlooName  # type: ignore[misc,assignment]
