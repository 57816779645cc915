"""Live capture: this process is a rank of a real job, and leaves a shard of what it did beside those of the others.

Switched on by PRISM_LIVE (a folder that all ranks can write) when torch is imported: ``autoload`` is an entry point of
torch's own "torch.backends". Nothing is seeded, replaced or ended: the program runs as it would.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prism_tools.graph.schema import Op

if TYPE_CHECKING:
    from prism_tools.capture.calls import Call
    from prism_tools.capture.device import Coalescing

FOLDER = "PRISM_LIVE"  # where shards go
STOP = "PRISM_LIVE_STOP"  # iterations after which tracing stops; 0: never
HOLD = "PRISM_LIVE_HOLD"  # iteration in which the host gets ahead of the device; 0: none


def autoload() -> None:
    """What torch calls at the end of its own import."""
    if os.environ.get(FOLDER):
        install(os.environ[FOLDER], *(int(os.environ.get(name) or 0) for name in (STOP, HOLD)))


def install(folder: str, stop_after: int, hold: int) -> None:
    """Trace every process group that this process makes from now on."""
    import torch.distributed as dist
    from torch.optim.optimizer import register_optimizer_step_post_hook

    if not dist.is_available():
        return
    from prism_tools.capture import groups, session

    session.SESSION = live = LiveSession(folder, stop_after, hold)
    groups.install()
    register_optimizer_step_post_hook(lambda *_: live.step_done())
    atexit.register(live.finish)


class LiveSession:
    """The state of one real rank; the part of Session's interface that real groups use, without a server.

    ``tracing``: whether operations are recorded. Begins with the first process group, ends with the window.
    """

    announces_groups = False

    def __init__(self, folder: str, stop_after: int, hold: int) -> None:
        from prism_tools.capture.trace import Tracer

        self.tracing = False
        self.tracer = Tracer()
        self.pending_ranks: tuple[int, ...] = ()
        self.rank = -1
        self.world_size = 0
        self.slots: dict[tuple[str, str, tuple[int, ...]], tuple[int, str]] = {}
        self._folder = Path(folder)
        self._stop_after = stop_after
        self._hold = hold
        self._pid = os.getpid()
        self.device: Any = None
        self._iterations = 0
        self._after_mark = False
        self._written = False

    def is_remote(self, ranks: tuple[int, ...]) -> bool:
        """Every group is real."""
        return False

    def enter(self, rank: int, size: int) -> None:
        """The default group is made: tracing begins. A program that makes it again goes on with the same trace."""
        if self._written or os.getpid() != self._pid:
            return
        self.rank, self.world_size = rank, size
        if not self.tracing:
            self.tracing = True
            self.tracer.host_end = time.monotonic_ns()

    def register(self, name: str, description: str, backend: str, ranks: tuple[int, ...]) -> int:
        """Slot of a group's backend."""
        return self.slots.setdefault((name, backend, ranks), (len(self.slots), description))[0]

    def issue(self, call: Call, slot: int, called: int) -> int:
        """Trace an operation on the host."""
        self.end_iteration()
        return self.tracer.comm(call, slot, called)

    def on_device(
        self, coalescing: Coalescing | None, call: Call, slot: int, called: int, real: Any, args: tuple, kwargs: dict
    ) -> Any:
        """Trace and run an operation on the device."""
        if self.end_iteration():
            return real(*args, **kwargs)
        return self._on_device().operation(coalescing, call, slot, called, real, args, kwargs)

    def begin_coalescing(self) -> Coalescing | None:
        """The program opens a group of operations on the device."""
        return self._on_device().begin_coalescing()

    def end_coalescing(self, opened: Coalescing) -> None:
        """The group is launched."""
        self._on_device().end_coalescing(opened)

    def _on_device(self) -> Any:
        if self.device is None:
            from prism_tools.capture.device import Device

            self.device = Device(self.tracer)
        return self.device

    def step_done(self) -> None:
        """An optimizer step ended (torch's global hook)."""
        if not self.tracing or os.getpid() != self._pid:
            return
        self.tracer.mark(Op.OPTIMIZER_STEP)
        if self.device is not None:
            self.device.mark(self.tracer.count - 1, 0 < self._hold == self._iterations + 1)
        self._after_mark = True

    def end_iteration(self) -> bool:
        """Count iterations as segments do: one ends with the last step before a communication. Whether the window is over."""
        if self._after_mark:
            self._after_mark = False
            self._iterations += 1
            if self._iterations == self._stop_after:
                self.finish()
        return not self.tracing

    def finish(self) -> None:
        """Stop tracing and leave the shard; the program goes on."""
        if self._written or self.rank < 0 or os.getpid() != self._pid:
            return
        from prism_tools.capture import shard

        self._written, self.tracing = True, False
        device, self.device = self.device, None
        apart = device.operations if device is not None else []
        trace = self.tracer.export(self.rank, [ranks for _, _, ranks in self.slots], apart)
        trace["slots"] = list(self.slots)
        trace["descriptions"] = [text for _, text in self.slots.values()]
        if device is not None:
            trace.update(device.stop(), first_operation=self.tracer.count - len(apart))
        trace.update(facts(self.rank, self.world_size))
        shard.write(trace, self._folder / f"{self.rank}.shard")


def facts(rank: int, world_size: int) -> dict[str, Any]:
    """Who and where this rank is, what it runs, and its peak memory."""
    import torch

    from prism_tools.capture.clock import reading
    from prism_tools.capture.session import peak_rss

    cuda = torch.cuda.is_initialized()
    return {
        "rank": rank,
        "world_size": world_size,
        "local_rank": int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or 0),
        "host": os.uname().nodename,
        "boot": reading()[0],
        "argv": program_of(sys.orig_argv),
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
        words = words[2 if words[0] in ("-X", "-W") else 1 :]
    return words
