"""Operations of a device's backend: what the tracer says of them to the stamp library, which sees the streams and events."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import monotonic_ns
from typing import Any

import torch

from prism_tools.capture.calls import Call
from prism_tools.capture.trace import DEVICE_LANE, Tracer
from prism_tools.gpu.stamp import Stamps

FIRST_ROWS, FIRST_EVENTS = 16384, 8192  # room before the first iteration is over
AHEAD = 3  # iterations like the last one that there must be room for, or more is made


@dataclass
class Coalescing:
    """An open group of operations that the backend launches as one (ncclGroup). ``ours``: ns that tracing took meanwhile."""

    batch: int
    before: int
    called: int = 0
    ours: int = 0
    nodes: list[int] = field(default_factory=list)


class Device:
    """The current CUDA device of this process, from its first traced operation on."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._stamps = Stamps()
        self._device = torch.cuda.current_device()
        self._stream = torch._C._cuda_getCurrentRawStream
        self._last = (0, 0)
        self._refused = ""
        self._held = False
        self._marked = monotonic_ns()
        self._stamps.reserve(FIRST_ROWS, FIRST_EVENTS)
        self._stamps.start()

    def operation(
        self, open_group: Coalescing | None, call: Call, slot: int, called: int, real: Any, args: tuple, kwargs: dict
    ) -> Any:
        """Trace ``real(*args, **kwargs)``; returns what it returns: C++ waits on the backend's own Work."""
        tracer, stamps = self._tracer, self._stamps
        if self._captured():
            return real(*args, **kwargs)
        if open_group is not None:
            tracer.batch = open_group.batch
            node = tracer.operation(call, slot, DEVICE_LANE, called)
            tracer.batch = -1
            open_group.nodes.append(node)
            entered = monotonic_ns()
            result = real(*args, **kwargs)
            open_group.ours += entered - called
            return result
        node = tracer.operation(call, slot, DEVICE_LANE, called)
        stream = self._stream(self._device)
        stamps.call(stream, node, not call.sync, called)
        entered = monotonic_ns()
        try:
            result = real(*args, **kwargs)
        except BaseException:
            tracer.withdraw(node)
            raise
        stamps.leave(stream, node, entered)
        return result

    def begin_coalescing(self) -> Coalescing | None:
        """The program opens a group. None: not to be traced."""
        if self._captured():
            return None
        before = monotonic_ns()
        opened = Coalescing(self._tracer.batches, before)
        self._tracer.batches += 1
        self._stamps.call(self._stream(self._device), self._tracer.count, True, before)
        opened.called = monotonic_ns()
        return opened

    def end_coalescing(self, opened: Coalescing) -> None:
        """The backend has launched the group."""
        node = opened.nodes[0] if opened.nodes else -1
        self._stamps.leave(self._stream(self._device), node, opened.called + opened.ours)

    def mark(self, node: int, hold: bool) -> None:
        """An optimizer step: tracer's ``node``. Makes room for the next iterations. ``hold``: let the host get ahead of
        the device in the iteration that begins, for no longer than the last one took."""
        self._stamps.mark(self._stream(self._device), node)
        rows, events = used = self._stamps.used()
        self._stamps.reserve(*(now + AHEAD * (now - before) for now, before in zip(used, self._last, strict=True)))
        self._last = (rows, events)
        at = monotonic_ns()
        if hold or self._held:
            self._stamps.hold(self._stream(self._device), at - self._marked if hold else 0)
        self._held, self._marked = hold, at

    def stop(self) -> dict[str, Any]:
        """The log, once the device has reached the end of it: {rows, stamps, device_error}."""
        self._stamps.stop()
        if self._held:
            self._stamps.hold(self._stream(self._device), 0)
        torch.cuda.synchronize(self._device)
        rows, stamps, error = self._stamps.read()
        return {"rows": rows, "stamps": stamps, "device_error": error, "refused": self._refused}

    def _captured(self) -> bool:
        """Whether the program is making a CUDA graph: the program goes on, but there will be no graph of it."""
        if not self._stamps.capturing():
            return False
        self._refused = "a CUDA graph holds communication, which live capture cannot time; run without CUDA graphs"
        return True
