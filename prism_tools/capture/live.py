"""Live capture: this process is a rank of a real job, and leaves a shard of what it did beside those of the others.

Switched on by PRISM_LIVE (a folder that all ranks can write) when torch is imported: ``autoload`` is an entry point of
torch's own "torch.backends". Nothing is seeded, replaced or ended: the program runs as it would.
"""

from __future__ import annotations

import atexit
import multiprocessing.util
import os
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prism_tools.graph.schema import Op

if TYPE_CHECKING:
    from prism_tools.capture.calls import Call
    from prism_tools.capture.device import Coalescing

SETTLE = 1.0  # seconds that operations which nobody waited for get to end at exit
FOLDER = "PRISM_LIVE"  # where shards go
STOP = "PRISM_LIVE_STOP"  # iterations after which tracing stops; 0: never
HOLD = "PRISM_LIVE_HOLD"  # iteration in which the host gets ahead of the device; 0: none


def autoload() -> None:
    """What torch calls at the end of its own import."""
    if os.environ.get(FOLDER):
        install(os.environ[FOLDER], *(int(os.environ.get(name) or 0) for name in (STOP, HOLD)))


def install(folder: str, stop_after: int, hold: int) -> None:
    """Trace every process group that this process, or one that it forks, makes from now on."""
    import torch.distributed as dist
    from torch.optim.optimizer import register_optimizer_step_post_hook

    if not dist.is_available():
        return
    from prism_tools.capture import groups, session

    def begin() -> None:
        session.SESSION = LiveSession(folder, stop_after, hold)

    begin()
    groups.install()
    register_optimizer_step_post_hook(lambda *_: session.SESSION.step_done())
    os.register_at_fork(after_in_child=begin)


class LiveSession:
    """The state of one real rank; the part of Session's interface that real groups use, without a server.

    ``tracing``: whether operations are recorded. Begins with the first process group, ends with the window. Nothing that
    goes wrong here may reach the program: tracing ends, and the shard says why.
    """

    announces_groups = False
    pretends = False
    callbacks_wait = False

    def __init__(self, folder: str, stop_after: int, hold: int) -> None:
        from prism_tools.capture.trace import Tracer

        self.tracing = False
        self.tracer = Tracer()
        self.pending_ranks: tuple[int, ...] = ()
        self.rank = -1
        self.world_size = 0
        self.device: Any = None
        self.slots: dict[tuple[str, str, tuple[int, ...]], tuple[int, str]] = {}
        self._pid = os.getpid()
        self._folder = Path(folder)
        self._stop_after = stop_after
        self._hold = hold
        self.callbacks: deque[int] = deque()  # those that backends' threads have yet to run
        self._lock = threading.Lock()
        self._log: Any = None  # the device, when its log can be read
        self._iterations = 0
        self._after_mark = False
        self._refused = ""
        self._written = False

    def is_remote(self, ranks: tuple[int, ...]) -> bool:
        """Every group is real."""
        return False

    def made_group(self, name: str, ranks: tuple[int, ...]) -> None:
        """The program makes a group of these global ranks; ``enter`` and ``register`` say what counts here."""

    def enter(self, rank: int, size: int) -> None:
        """The default group is made: tracing begins. A program that makes it again goes on with the same trace."""
        if self.rank >= 0:
            if (rank, size) != (self.rank, self.world_size):
                self.give_up(f"the program is rank {self.rank} of {self.world_size} first, then {rank} of {size}")
            return
        self.rank, self.world_size, self.tracing = rank, size, True
        self.tracer.host_end = time.monotonic_ns()
        atexit.register(self.at_exit)
        multiprocessing.util.Finalize(None, self.at_exit, exitpriority=0)  # how a child of multiprocessing ends
        os.environ.pop(FOLDER, None)  # other programs that this one starts are not ranks of its job
        others = [word for word in os.environ.pop("LD_PRELOAD", "").split() if not Path(word).name.startswith("stamp-")]
        if others:
            os.environ["LD_PRELOAD"] = " ".join(others)

    def register(self, name: str, description: str, backend: str, ranks: tuple[int, ...]) -> int:
        """Slot of a group's backend."""
        with self._lock:
            return self.slots.setdefault((name, backend, ranks), (len(self.slots), description))[0]

    def issue(self, call: Call, slot: int, called: int) -> int:
        """Trace an operation on the host."""
        self.end_iteration()
        return self.tracer.comm(call, slot, called)

    def on_device(
        self, coalescing: Coalescing | None, call: Call, slot: int, called: int, real: Any, args: tuple, kwargs: dict
    ) -> Any:
        """Trace and run an operation on the device."""
        device = None if self.end_iteration() else self._device_of(call)
        if device is None:
            return real(*args, **kwargs)
        return device.operation(coalescing, call, slot, called, real, args, kwargs)

    def unknown(self, name: str, real: Any, args: tuple, kwargs: dict) -> Any:
        """Run an operation whose arguments tracing does not understand: a wrong call, which the backend refuses itself."""
        result = real(*args, **kwargs)
        self.give_up(f"{name} was called in a form that is not known")
        return result

    def begin_coalescing(self) -> Coalescing | None:
        """The program opens a group of operations on the device. None: not to be traced."""
        device = None if self.end_iteration() else self._device_of(None)
        return None if device is None else device.begin_coalescing()

    def _device_of(self, call: Call | None) -> Any:
        """The device, made for the first operation; None if tracing has ended."""
        import torch

        tensors = (call.ins or call.outs) if call is not None else []
        try:
            index = tensors[0].device.index if tensors else torch.cuda.current_device()
            if self.device is None and self.tracing:
                from prism_tools.capture.device import Device

                self.device = Device(self.tracer, index)
            elif self.device is not None and tensors and index != self.device.index:
                self.give_up("one process communicates on several devices")
        except Exception as problem:  # the program must not see it
            self.give_up(str(problem))
        return self.device

    def step_done(self) -> None:
        """An optimizer step ended (torch's global hook)."""
        if not self.tracing:
            return
        self.tracer.mark(Op.OPTIMIZER_STEP)
        if self.device is not None:
            try:
                begins = self._iterations + 1
                left = max(self._stop_after - begins, 0)
                self.device.mark(self.tracer.count - 1, not self._after_mark, left, 0 < self._hold == begins)
            except Exception as problem:
                self.give_up(str(problem))
        self._after_mark = True

    def end_iteration(self) -> bool:
        """Count iterations as segments do: one ends with the last step before a communication. Whether the window is over."""
        if self._after_mark:
            with self._lock:
                ended, self._after_mark = self._after_mark, False
            self._iterations += ended
            if ended and self._iterations == self._stop_after:
                self.finish()
        return not self.tracing

    def give_up(self, reason: str) -> None:
        """Trace no more: there can be no graph."""
        self._refused = self._refused or reason
        self._stop()

    def _stop(self) -> bool:
        """End the window. Whether the log may be read now."""
        with self._lock:
            self.tracing = False
            self._log, self.device = self._log or self.device, None
        return self._log is None or self._log.pause()

    def finish(self) -> None:
        """Stop tracing and leave the shard; the program goes on."""
        if self._written or self.rank < 0 or os.getpid() != self._pid or not self._stop():
            return
        self._written = True
        try:
            self._leave_shard()
        except Exception as problem:
            print(f"prism: rank {self.rank} on {os.uname().nodename} leaves no trace: {problem}", file=sys.stderr)

    def at_exit(self) -> None:
        """The program is over: let the backends' threads run our callbacks, which an interpreter that ends would kill."""
        deadline = time.monotonic() + SETTLE
        while self.callbacks and time.monotonic() < deadline and os.getpid() == self._pid:
            time.sleep(0.001)
        self.finish()

    def _leave_shard(self) -> None:
        from prism_tools.capture import shard

        apart = list(self._log.operations) if self._log is not None else []
        trace = self.tracer.export(self.rank, [ranks for _, _, ranks in self.slots], apart)
        trace["slots"] = list(self.slots)
        trace["descriptions"] = [text for _, text in self.slots.values()]
        if self._log is not None and not self._refused and not self._log.refused:
            try:
                trace.update(self._log.read(), first_operation=self.tracer.count - len(apart))
            except RuntimeError as problem:
                self._refused = str(problem)
        trace["refused"] = self._refused or (self._log.refused if self._log is not None else "")
        trace.update(facts(self.rank, self.world_size))
        name = f"{trace['attempt']}.{self.rank}.{trace['host']}.{self._pid}.shard"  # its own, even if two are this rank
        shard.write(trace, self._folder / name)


def facts(rank: int, world_size: int) -> dict[str, Any]:
    """Who and where this rank is, what it runs, and its peak memory."""
    import torch

    from prism_tools.capture.clock import reading
    from prism_tools.capture.session import peak_rss
    from prism_tools.launch.placement import placement

    cuda = torch.cuda.is_initialized()
    place = placement()
    return {
        "rank": rank,
        "world_size": world_size,
        "attempt": place.attempt,
        "host": place.node,
        "launcher": place.launcher,
        "tasks": place.world,
        "boot": reading()[0],
        "argv": sys.argv if "multiprocessing" in " ".join(sys.orig_argv[1:4]) else program_of(sys.orig_argv),
        "cwd": os.getcwd(),
        "python": sys.executable,
        "rss": peak_rss(),
        "allocated": torch.cuda.max_memory_allocated() if cuda else -1,
        "reserved": torch.cuda.max_memory_reserved() if cuda else -1,
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else "",
    }


def program_of(orig_argv: list[str]) -> list[str]:
    """``[-m] program argument …`` of an interpreter's command line; its own options are left out."""
    words = orig_argv[1:]
    while words and words[0].startswith("-") and words[0] not in ("-m", "-c"):
        flag = words[0]
        words = words[2 if flag in ("-X", "-W") else 1 :]
        if not flag.startswith("--") and flag[-1] in "mc":  # -um module
            return ["-" + flag[-1], *words]
    return words
