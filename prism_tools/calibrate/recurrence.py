"""x(k) as a max-plus function of x(k − 1): cycle time, critical cycle and period of an iteration that repeats for ever.

All arithmetic is on integers: where the cycle time is a fraction, times are multiplied by its denominator. int64 holds
that for cycles of up to 10^18 ns, such as 10,000 iterations of a day each.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from math import gcd

import numpy as np

from prism_tools.graph.compiled import Kernel
from prism_tools.graph.model import Ragged

NEVER = -(2**61)  # before every time
SWEEPS = 5  # about how often all variables are computed, at least


@dataclass
class Cycle:
    """A cycle of the recurrence: its delays add up to ``total`` ns over ``iterations``; ``variables``, first to last."""

    total: int
    iterations: int
    variables: list[int]


class Recurrence:
    """Variables 0 … n − 1 of one iteration: x[i] = max(x[j] for j in sources[i]) + delay[i], in dependency order.

    A source n + s is variable ``carried[s]`` of the iteration before. Variables without sources are ready at 0.
    ``sources``: int64 rows; ``delay``: int64[n], ns; ``carried``: int64.
    """

    def __init__(self, sources: Ragged, delay: np.ndarray, carried: np.ndarray) -> None:
        self._sources, self._delay, self._carried = sources, delay, carried

    def cycle(self) -> Cycle | None:
        """A cycle with the largest mean; None if there is no cycle. Each better cycle that shows up gives the next guess
        of the mean; the one that nothing improves on is right (Newton's method for the cycle ratio)."""
        best, found = None, self._better(-1, 1)
        while found is not None:
            best, found = found, self._better(found.total, found.iterations)
        return best

    def period(self, cycle: Cycle, horizon: int) -> tuple[int, int]:
        """The least (k0, p) with x(k + p) − x(k) = p · mean of ``cycle`` for all variables from k0 on, x(0) beginning at
        0 everywhere; (-1, -1) if nothing recurs within ``horizon`` iterations."""
        common = gcd(cycle.total, cycle.iterations)
        scale, mean = cycle.iterations // common, cycle.total // common
        seen: dict[bytes, int] = {}
        before = np.zeros(len(self._carried), np.int64)
        for k in range(horizon + 1):  # of iteration k: scale · x(k) − k · mean
            values, _ = self._sweep(before, max(-k * mean, NEVER), scale)
            key = hashlib.blake2b(values[: len(self._delay)].tobytes(), digest_size=16).digest()
            if key in seen:
                return seen[key], k - seen[key]
            seen[key] = k
            before = values[self._carried] - mean
        return -1, -1

    def _sweep(self, before: np.ndarray, ready: int, scale: int) -> tuple[np.ndarray, np.ndarray]:
        """All variables, then ``before`` and ``ready``, with all delays times ``scale``; and for each variable the source
        that was latest (the first of them)."""
        x = np.concatenate([np.empty(len(self._delay), np.int64), before, np.array([ready], np.int64)])
        binding = np.empty(len(self._delay), np.int64)
        offset, source = self._sources.offset, self._sources.data
        _evaluate(SWEEPS * len(self._delay), offset, source, self._delay, scale, x, binding)
        return x, binding

    def _better(self, total: int, iterations: int) -> Cycle | None:
        """A cycle whose mean is larger than total / iterations; None if there is none.

        Bellman and Ford's: as long as a longer path to some carried variable is found, look for a cycle among the last
        such paths; its delays are larger than the mean.
        """
        states = len(self._carried)
        reached = np.zeros(states, np.int64)
        origin, weight, when = np.full(states, -1), np.zeros(states, np.int64), np.zeros(states, np.int64)
        bindings: list[np.ndarray] = []
        while True:
            x, binding = self._sweep(reached, NEVER, iterations)
            after = x[self._carried] - total
            improved = np.flatnonzero(after > reached)
            if not len(improved):
                return None
            root = np.append(binding, np.arange(len(binding), len(x)))
            while (root < len(binding)).any():
                root = root[root]
            origin[improved] = root[self._carried[improved]] - len(binding)
            weight[improved] = (x[self._carried] - reached[origin])[improved] // iterations
            when[improved] = len(bindings)
            bindings.append(binding)
            reached = np.maximum(reached, after)
            loops = _loops(origin.tolist())
            if loops:
                sums = [(int(weight[loop].sum()), loop) for loop in loops]
                best, loop = sums[0]
                for other, candidate in sums[1:]:
                    if other * len(loop) > best * len(candidate):
                        best, loop = other, candidate
                return Cycle(best, len(loop), self._path(loop, [bindings[when[state]] for state in loop]))

    def _path(self, loop: list[int], bindings: list[np.ndarray]) -> list[int]:
        """The variables on the paths that lead from each state of ``loop`` back to the next."""
        path = []
        for state, binding in zip(loop, bindings, strict=True):
            place = int(self._carried[state])
            while place < len(binding):
                path.append(place)
                place = int(binding[place])
        return path[::-1]


@Kernel
def _evaluate(offset, source, delay, scale, x, binding):
    """Fill in the variables of ``x``, behind which is what they begin with, and ``binding``."""
    for i in range(len(delay)):
        latest = len(x) - 1
        for at in range(offset[i], offset[i + 1]):
            if at == offset[i] or x[source[at]] > x[latest]:
                latest = source[at]
        x[i] = x[latest] + delay[i] * scale
        binding[i] = latest


def _loops(origin: list[int]) -> list[list[int]]:
    """The cycles of a map (-1: nowhere), each from one element to its origin, that one's origin, and so on."""
    seen = [0] * len(origin)
    found = []
    for start in range(len(origin)):
        state = start
        while state >= 0 and not seen[state]:
            seen[state] = start + 1
            state = origin[state]
        if state >= 0 and seen[state] == start + 1:
            loop = [state]
            while origin[loop[-1]] != state:
                loop.append(origin[loop[-1]])
            found.append(loop)
    return found
