"""Where iterations begin and end: the segment of every node of a program, from optimizer steps or from repetition."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np

from prism_tools.graph.schema import EPILOGUE, PROLOGUE, Kind, Op


def find_segments(columns: Mapping[str, np.ndarray]) -> np.ndarray:
    """The segment of each node, int32[n]: PROLOGUE, iteration k >= 0, EPILOGUE (see schema).

    ``columns`` are a program's node columns; kind, op, slot and callsite are read. An iteration ends with its last
    optimizer step; where no step was seen, with the last communication of the smallest repeating period.
    """
    marks = np.flatnonzero((columns["kind"] == Kind.MARK) & (columns["op"] == Op.OPTIMIZER_STEP))
    start, ends = _by_marks(columns, marks) if len(marks) else _by_period(columns)
    n = len(columns["kind"])
    if not len(ends):
        return np.full(n, PROLOGUE, np.int32)
    segment = np.searchsorted(ends, np.arange(n), side="right").astype(np.int32)  # how many iterations ended before
    segment[ends[-1] :] = EPILOGUE
    segment[:start] = PROLOGUE
    return segment


def _by_marks(columns: Mapping[str, np.ndarray], marks: np.ndarray) -> tuple[int, np.ndarray]:
    """Start of iteration 0 and the end (first node after) of each iteration.

    Steps with no communication between them belong to one iteration (several optimizers), except in a program that
    never communicates: there every step ends an iteration.
    """
    comm = columns["kind"] == Kind.COMM
    before = np.cumsum(comm)[marks]  # communications up to each mark
    last = np.append(before[1:] != before[:-1], True) if comm.any() else np.ones(len(marks), bool)
    ends = marks[last] + 1
    if len(ends) == 1:
        return 0, ends
    talks = np.isin(columns["kind"], (Kind.COMM, Kind.WAIT))
    word = columns["callsite"].astype(np.int64) * 256 + columns["op"]
    after = talks & (np.arange(len(word)) >= ends[0])
    once = np.flatnonzero(talks[: ends[0]] & ~np.isin(word[: ends[0]], word[after]))
    return (int(once[-1]) + 1 if len(once) else 0), ends


def _by_period(columns: Mapping[str, np.ndarray]) -> tuple[int, np.ndarray]:
    """As _by_marks, from the sequence of communications; no ends where nothing repeats."""
    comm = np.flatnonzero(columns["kind"] == Kind.COMM)
    words = [tuple(word) for word in np.stack([columns[c][comm] for c in ("op", "slot", "callsite")], 1).tolist()]
    count = Counter(words)
    stop = len(words)
    while stop and count[words[stop - 1]] == 1:  # what happens once cannot repeat: a final barrier is epilogue
        stop -= 1
    period, length = _longest_repetition(words[:stop])
    if not period:
        return 0, np.empty(0, np.int64)
    firsts = stop - np.arange(length // period, -1, -1) * period  # first communication of each iteration, and the stop
    talks = np.flatnonzero(np.isin(columns["kind"], (Kind.COMM, Kind.WAIT)))
    limits = np.append(comm, len(columns["kind"]))[firsts]
    last_before = np.searchsorted(talks, limits) - 1  # waits that follow a period's last communication belong to it
    bounds = np.where(last_before >= 0, talks[last_before] + 1, 0)
    return int(bounds[0]), bounds[1:]


def _longest_repetition(words: list[tuple]) -> tuple[int, int]:
    """(period, length) of the longest tail that is at least two periods long; the smallest such period; (0, 0) if none.

    The longest, not merely the smallest: two equal buckets at the end of every iteration also repeat, but cover less.
    z[p] = how far the reversed sequence agrees with itself shifted by p (the Z algorithm, linear).
    """
    back, n = words[::-1], len(words)
    z = [0] * n
    best = (0, 0)
    left = right = 0
    for p in range(1, n):
        if p < right:
            z[p] = min(right - p, z[p - left])
        while p + z[p] < n and back[z[p]] == back[p + z[p]]:
            z[p] += 1
        if p + z[p] > right:
            left, right = p, p + z[p]
        if z[p] >= p and z[p] + p > best[1]:
            best = (p, z[p] + p)
    return best
