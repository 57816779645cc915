"""Operations of a device's backend: what the tracer says of them to the stamp library, which sees the streams and events.

Python is slow where its code is cold, as it is between a program's thousands of kernels (50 to 90 µs to describe an
operation, 5 in a loop). So what an operation was is remembered by its place in the iteration, and one that looks the same at
the same place in the next iteration is traced without a second look: its call site and its reduction are taken to be the same.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from time import monotonic_ns
from typing import Any

import torch

from prism_tools.capture.calls import Call
from prism_tools.capture.trace import DEVICE_LANE, Described, Tracer
from prism_tools.gpu.stamp import Stamps

FIRST_ROWS, FIRST_EVENTS = 16384, 8192  # room before the first iteration is over
AHEAD = 32  # iterations like the last one that more room is made for, where the end of the window is not known
MOST_EVENTS = 4_000_000  # in all; a step of FSDP2 takes about a thousand


@dataclass
class Coalescing:
    """An open group of operations that the backend launches as one (ncclGroup). ``ours``: ns that tracing took meanwhile."""

    device: Device
    batch: int
    ours: int = 0
    numbers: list[int] = field(default_factory=list)

    def end(self) -> None:
        """The backend has launched the group, or failed to."""
        self.device.leave(self.numbers[0] if self.numbers else -1, self.ours)


class Device:
    """The CUDA device of this process's operations, from the first traced one on.

    ``operations``: what every operation was, by number, as the tracer describes it; ``this``: those of this iteration
    that may come again, in order, as (key, description, synchronous); ``last``: the same of the iteration before.
    ``refused``: why there can be no graph, "" while there can.
    """

    def __init__(self, tracer: Tracer, index: int) -> None:
        self.index = index
        self.stream = torch._C._cuda_getCurrentRawStream
        self.lock = threading.Lock()  # a number and its place in the lists go together
        self.operations: list[Described] = []
        self.last: list[tuple[Any, Described, bool]] = []
        self.this: list[tuple[Any, Described, bool]] = []
        self.refused = ""
        self._tracer = tracer
        self._stamps = stamps = Stamps()
        self.call, self.leave = stamps.call, stamps.leave
        self._used, self._room = (0, 0), FIRST_EVENTS
        self._held = self._learns = False
        self._marked = monotonic_ns()
        with torch.cuda.device(index):
            stamps.reserve(FIRST_ROWS, FIRST_EVENTS)
            stamps.start()

    def operation(
        self, open_group: Coalescing | None, call: Call, slot: int, called: int, real: Any, args: tuple, kwargs: dict
    ) -> Any:
        """Trace ``real(*args, **kwargs)``; returns what it returns: C++ waits on the backend's own Work."""
        tracer = self._tracer
        with self.lock:
            number = len(self.operations)
            outer, tracer.batch = tracer.batch, -1 if open_group is None else open_group.batch
            self.operations.append(tracer.describe(call, slot, DEVICE_LANE))
            tracer.batch = outer
        if open_group is not None:
            open_group.numbers.append(number)
            open_group.ours += monotonic_ns() - called
            return real(*args, **kwargs)
        return self.run(number, call.sync, called, real, args, kwargs)

    def run(self, number: int, sync: bool, called: int, real: Any, args: tuple, kwargs: dict) -> Any:
        """Run an operation that has been described."""
        if self.call(self.stream(self.index), number, not sync, called):
            self._capture()
            return real(*args, **kwargs)
        try:
            result = real(*args, **kwargs)
        except BaseException:
            self.leave(-1, 0)
            raise
        self.leave(number, 0)
        return result

    def _capture(self) -> None:
        """The program makes a CUDA graph of an operation: it goes on, but there will be no graph of it."""
        self.refused = "a CUDA graph holds communication, which live capture cannot time; run without CUDA graphs"

    def begin_coalescing(self) -> Coalescing | None:
        """The program opens a group. None: not to be traced."""
        with self.lock:
            opened = Coalescing(self, self._tracer.batches)
            self._tracer.batches += 1
        if self.call(self.stream(self.index), len(self.operations), True, monotonic_ns()):
            self._capture()
            return None
        return opened

    def mark(self, node: int, boundary: bool, left: int, hold: bool) -> None:
        """An optimizer step: tracer's ``node``; ``boundary``: it ends an iteration. Makes room where there is none for two
        more: for the ``left`` ones of the window, if that is known. ``hold``: let the host get ahead of the device in the
        iteration that begins, for no longer than the last one took; one later, learn from it."""
        stream = self.stream(self.index)
        self._stamps.mark(stream, node, boundary)
        if boundary and not self._stamps.capturing():
            self.last, self.this = self.this, []
            self._make_room(left or AHEAD)
            at = monotonic_ns()
            if hold or self._held:
                self._stamps.hold(stream, at - self._marked if hold else 0)
            if self._learns:
                self._stamps.learn()
            self._learns, self._held, self._marked = self._held, hold, at
        self._stamps.marked()

    def _make_room(self, iterations: int) -> None:
        """Making an event takes 3 µs: best done at once, in an iteration that warms up."""
        used = self._stamps.used()
        last = [now - before for now, before in zip(used, self._used, strict=True)]
        self._used = used
        if used[1] > MOST_EVENTS:
            self.refused = f"{MOST_EVENTS:,} events are more than live capture keeps; add --iterations"
            self._stamps.stop()
        elif used[1] + 2 * last[1] > self._room:
            rows, self._room = (now + (iterations + 2) * each for now, each in zip(used, last, strict=True))
            self._stamps.reserve(rows, self._room)

    def pause(self) -> bool:
        """Log no more. Whether the log may be read now: not while a CUDA graph is being captured."""
        self._stamps.stop()
        if self._held:
            self._stamps.hold(self.stream(self.index), 0)
        return not self._stamps.capturing()

    def read(self) -> dict[str, Any]:
        """The log, once the device has reached the end of it: {rows, stamps, device_error}."""
        rows, stamps, error = self._stamps.read()
        return {"rows": rows, "stamps": stamps, "device_error": error}
