"""Clocks: the monotonic clock of another machine against this one's, by ping-pong before and after a run (design §8)."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

PINGS = 16
BOOT_ID = "/proc/sys/kernel/random/boot_id"
NAMESPACE = "/proc/self/ns/time"


def reading() -> tuple[str, int]:
    """(identity of this process's clock, its time in ns). A machine has one clock, and one more for each time namespace."""
    name = Path(BOOT_ID).read_text().strip()
    with contextlib.suppress(OSError):  # a kernel without them
        name += " " + os.readlink(NAMESPACE)
    return name, time.monotonic_ns()


@dataclass(frozen=True)
class Clock:
    """``offset``: ns to add to another machine's times to reach ours; ``drift``: parts per 1e9; ``error``: bound, ns."""

    offset: int = 0
    drift: int = 0
    error: int = 0

    def to_ours(self, when: int) -> int:
        """A time of theirs on our clock."""
        return when + self.offset

    def to_theirs(self, when: int) -> int:
        """A time of ours on their clock."""
        return when - self.offset


@dataclass(frozen=True)
class Sample:
    """One comparison: at our time ``at``, ``offset`` ± ``error`` is to be added to the other clock's times to reach ours."""

    at: int = 0
    offset: int = 0
    error: int = 0

    def beyond(self, other: Sample) -> Sample:
        """What is to be added to this clock's times to reach the ``other`` one's; exact for a clock and itself."""
        error = 0 if self == other else self.error + other.error
        return Sample(self.at, self.offset - other.offset, error)


def compare(ask: Callable[[], tuple[str, int]]) -> Sample:
    """The best of PINGS round trips; exact (0 ± 0) where both read the same clock."""
    mine, now = reading()
    best = None
    for _ in range(PINGS):
        before = time.monotonic_ns()
        theirs, then = ask()
        after = time.monotonic_ns()
        if theirs == mine:
            return Sample(now, 0, 0)
        middle = (before + after) // 2
        sample = Sample(middle, middle - then, (after - before + 1) // 2)
        if best is None or sample.error < best.error:
            best = sample
    assert best is not None
    return best


def between(first: Sample, last: Sample) -> Clock:
    """Offset at ``first``, drift until ``last``, and the larger error."""
    span = max(last.at - first.at, 1)
    drift = (last.offset - first.offset) * 10**9 // span
    return Clock(first.offset, drift, max(first.error, last.error))
