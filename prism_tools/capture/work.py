"""Works and Futures: where a rank blocks, for operations played by a server and for those of a real backend."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch._C._distributed_c10d import Work

from prism_tools.capture.calls import Call, densified
from prism_tools.capture.trace import called_by_torch
from prism_tools.capture.wire import dtype_name
from prism_tools.graph.schema import Op

if TYPE_CHECKING:
    from prism_tools.capture.session import Session

SPIN_NS = 60_000  # the kernel wakes a sleeper late by about this much: the rest is spun


def sleep_until(when: int) -> None:
    """Return at ``when`` (CLOCK_MONOTONIC ns), within a few microseconds where the CPU is free."""
    while (left := when - time.monotonic_ns()) > 0:
        if left > SPIN_NS:
            time.sleep((left - SPIN_NS) / 1e9)


class TracedFuture(torch.futures.Future):
    """A Future whose Python wait, value and then go through the work first, so that the tracer and the server see them."""

    def __new__(cls, work: TracedWork) -> TracedFuture:
        return super().__new__(cls)

    def __init__(self, work: TracedWork) -> None:
        super().__init__()
        self._work = work

    def follow(self, real: torch.futures.Future) -> None:
        """The backend's own future is done."""
        try:
            value = real.value()
        except Exception as problem:
            torch.futures.Future.set_exception(self, problem)
        else:
            torch.futures.Future.set_result(self, value)

    def wait(self) -> Any:
        self._work.wait()
        return super().wait()

    def value(self) -> Any:
        self._work.wait()
        return super().value()

    def done(self) -> bool:
        return self._work.is_completed() or super().done()

    def then(self, callback: Callable) -> Any:
        # NCCL's futures are complete at enqueue, so its callbacks run in program order on this thread: do the same.
        self._work.wait()
        return super().then(callback)


class RealFuture(TracedFuture):
    """The Future of a live rank's work: only waiting is traced; callbacks run when and where the backend runs them."""

    def value(self) -> Any:
        return torch.futures.Future.value(self)

    def done(self) -> bool:
        return torch.futures.Future.done(self)

    def then(self, callback: Callable) -> Any:
        return torch.futures.Future.then(self, callback)


class TracedWork(Work):
    """What every traced operation returns. Subclasses say how to wait and how to poll."""

    def __init__(self, session: Session, call: Call, node: int) -> None:
        super().__init__()
        self._session = session
        self._call = call
        self._node = node
        self._waited = False
        self._planned = 0  # when a played operation ends
        self._future: TracedFuture | None = None
        self._problem: RuntimeError | None = None  # why a played operation failed

    def _block(self) -> None:
        """Return when the results are there."""
        raise NotImplementedError

    def wait(self, timeout: Any = None) -> bool:
        """Block until the results are there. Idempotent: only the first wait is an event."""
        if not self._waited:
            self._waited = True
            entered = time.monotonic_ns()
            self._block()
            if self._problem is None:
                self._session.tracer.waited(self._node, entered, called_by_torch(1), self._planned)
        if self._problem is not None:
            raise self._problem
        return True

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def result(self) -> list[torch.Tensor]:
        return self._call.given or self._call.outs or self._call.ins

    def exception(self) -> RuntimeError | None:
        return self._problem

    def _seen_complete(self) -> bool:
        """A poll succeeded: from here on the program knows, which is the same as having waited."""
        if not self._waited:
            self._waited = True
            self._session.tracer.waited(self._node, time.monotonic_ns(), False, self._planned)
        return True

    def _queue_wait(self) -> None:
        """DDP's reducer waits in C++; its finalize callback runs after this one, in the order of its buckets."""
        try:
            torch.autograd.Variable._execution_engine.queue_callback(self.wait)
        except RuntimeError:
            pass  # not inside a backward pass


class RemoteWork(TracedWork):
    """An operation that the server plays (record: executed by the coordinator; emulated: delivered at a planned time)."""

    def __init__(self, session: Session, call: Call, node: int, opid: int, eager: bool) -> None:
        super().__init__(session, call, node)
        self.opid = opid
        self._complete = eager  # sends are buffered where the server says so: nothing will come back
        self._event: threading.Event | None = None
        self._source = call.peer
        self._thread = threading.get_ident()

    def _block(self) -> None:
        if self._complete:
            return
        if self._event is None and not self._session.client.announce and threading.get_ident() != self._thread:
            self._event = threading.Event()  # the answer goes to the socket of the thread that issued it
            self._session.client.watch(self)
        if self._event is not None:
            if self._session.client.announce:
                self._session.client.post(("wait", self.opid))
            self._session.client.wait_for(self._event)
        else:
            entered = time.monotonic_ns()
            self.complete(*self._session.client.wait(self.opid, self._call.sync), entered)

    def complete(self, answer: tuple, payload: memoryview, entered: int = 0) -> None:
        """Results have come: copy them out, at the planned time if there is one (any thread).

        ``entered``: when this rank began to wait; what came in time but was not asked for until then is not late.
        """
        kind, _, descs, when, peer = answer
        self._planned = when
        if kind == "failed":
            self._problem = RuntimeError(descs)
        else:
            copy_out(self._call.outs, descs, payload)
            if self._call.given and self._call.given[0].is_sparse:
                densified(self._call)
        if when:
            by = time.monotonic_ns() - max(when, entered)
            if by > 0 and entered <= when:
                self._session.tracer.late.append((self._node, by))
            sleep_until(when)
        if peer >= 0 and self._call.peer < 0:
            self._source = peer
            self._session.tracer.source(self._node, peer)
        self._session.tracer.completed(self._node, when or time.monotonic_ns())
        self._complete = True
        if (
            self._future is not None
        ):  # before the wait returns, as gloo does it: callbacks that are added from then on run at once
            self._settle(self._future)
        if self._event is not None:
            self._event.set()

    def _settle(self, future: TracedFuture) -> None:
        if self._problem is not None:
            torch.futures.Future.set_exception(future, self._problem)
        else:
            torch.futures.Future.set_result(future, self.result())

    def is_completed(self) -> bool:
        if not self._complete and (self._event is None or self._session.client.announce):
            found = self._session.client.test(self.opid)
            if found is not None:
                self.complete(*found)
        return self._complete and self._seen_complete()

    def is_success(self) -> bool:
        return self._complete and self._problem is None

    def source_rank(self) -> int:
        return self._source

    _source_rank = source_rank

    def get_future(self) -> TracedFuture:
        if self._future is None:
            self._future = TracedFuture(self)
            if self._complete:
                self._settle(self._future)
            else:
                self._queue_wait()
                self._event = threading.Event()
                self._session.client.watch(self)
        return self._future


class RealWork(TracedWork):
    """An operation of the real backend."""

    def __init__(self, session: Session, call: Call, node: int, work: Work) -> None:
        super().__init__(session, call, node)
        self._work = work
        if not call.sync:
            self._stamp_completion()

    def _stamp_completion(self) -> None:
        tracer, node, running = self._session.tracer, self._node, self._session.callbacks

        def stamp(_: Any) -> None:
            tracer.completed(node, time.monotonic_ns())
            running.pop()

        try:
            future = self._work.get_future()
        except RuntimeError:
            return  # gloo has no future for some operations: the end is where the wait returns
        running.append(node)
        future.add_done_callback(stamp)

    def wait(self, *timeout: Any) -> bool:
        """The real wait, every time, with the timeout that the program gave; the first that succeeds is an event."""
        entered = time.monotonic_ns()
        result = self._work.wait(*timeout)
        if not self._waited:
            self._waited = True
            if self._call.op is Op.RECV and self._call.peer < 0:
                self._session.tracer.source(self._node, self._work._source_rank())
            self._session.tracer.waited(self._node, entered, called_by_torch(1))
        return result

    def is_completed(self) -> bool:
        return self._work.is_completed() and self._seen_complete()

    def is_success(self) -> bool:
        return self._work.is_success()

    def exception(self) -> Any:
        return self._work.exception()

    def result(self) -> list[torch.Tensor]:
        return self._work.result()

    def synchronize(self) -> None:
        entered = time.monotonic_ns()
        self._work.synchronize()
        if not self._waited:
            self._waited = True
            self._session.tracer.waited(self._node, entered, False)

    def _get_op_type(self) -> Any:
        return self._work._get_op_type()

    def _get_duration(self) -> float:
        return self._work._get_duration()

    def source_rank(self) -> int:
        return self._work.source_rank()

    def _source_rank(self) -> int:
        return self._work._source_rank()

    def get_future(self) -> torch.futures.Future:
        if self._future is None:
            real = self._work.get_future()
            self._queue_wait()
            self._future = future = TracedFuture(self) if self._session.callbacks_wait else RealFuture(self)
            running = self._session.callbacks
            running.append(self._node)

            def follow(done: torch.futures.Future) -> None:
                future.follow(done)
                running.pop()

            real.add_done_callback(follow)
        return self._future


def copy_out(outs: list[torch.Tensor], descs: list[tuple[str, int]], payload: memoryview) -> None:
    """Copy received bytes into the destination tensors, past autograd as a backend does. RuntimeError where sizes differ."""
    offset = 0
    for out, (name, count) in zip(outs, descs, strict=True):
        size = count * out.element_size()
        if out.numel() != count or dtype_name(out.dtype) != name:
            raise RuntimeError(f"prism: {count} elements of {name} came for {out.numel()} of {out.dtype}")
        if size and out.is_contiguous():
            ctypes.memmove(out.data_ptr(), ctypes.addressof(ctypes.c_char.from_buffer(payload, offset)), size)
        elif size:
            source = torch.frombuffer(payload, dtype=out.dtype, count=count, offset=offset)
            with torch.no_grad():
                out.detach().copy_(source.view(out.shape))
        offset += size
