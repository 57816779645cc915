"""Clocks: a rank's monotonic clock against its server's, by ping-pong before and after the run (design §8)."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

PINGS = 16
BOOT_ID = "/proc/sys/kernel/random/boot_id"


def reading() -> tuple[str, int]:
    """(identity of this machine's clock, its time in ns): what a server answers to "clock"."""
    return Path(BOOT_ID).read_text().strip(), time.monotonic_ns()


@dataclass
class Clock:
    """``offset``: ns to add to this process's times to reach the server's; ``drift``: parts per 1e9; ``error``: bound, ns."""

    offset: int = 0
    drift: int = 0
    error: int = 0


@dataclass
class Sample:
    """One comparison: at local time ``at`` the server's clock was ahead by ``offset`` ± ``error``."""

    at: int
    offset: int
    error: int


def compare(ask: Callable[[], tuple[str, int]]) -> Sample:
    """The best of PINGS round trips; exact (0 ± 0) where both sides read the same machine's clock."""
    mine, _ = reading()
    best = None
    for _ in range(PINGS):
        before = time.monotonic_ns()
        theirs, then = ask()
        after = time.monotonic_ns()
        if theirs == mine:
            return Sample(after, 0, 0)
        sample = Sample((before + after) // 2, then - (before + after) // 2, (after - before + 1) // 2)
        if best is None or sample.error < best.error:
            best = sample
    assert best is not None
    return best


def between(first: Sample, last: Sample) -> Clock:
    """Offset at ``first``, drift until ``last``, and the larger error."""
    span = max(last.at - first.at, 1)
    drift = (last.offset - first.offset) * 10**9 // span
    return Clock(first.offset, drift, max(first.error, last.error))
