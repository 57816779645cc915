"""Who is in which group, at which place and by which slot: all groups as flat arrays."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from prism_tools.graph.compiled import Kernel
from prism_tools.graph.model import Graph

MANY = 100_000  # look-ups, from which on compiled code, that searches each group by itself, is faster


class Members:
    """The members of all groups one after the other: ``group`` and ``rank`` (global) of each; ``repeated``: it was in
    the same group before. ``start``, ``size``: where each group's members begin, and how many.
    ``slot_group[slot_start[r] + s]``: the group that rank r has in slot s; ``slot``: of each member, the first in which
    its rank has the group, -1: in none.
    """

    def __init__(self, graph: Graph) -> None:
        members, slots = graph.groups.members, graph.ranks.slots
        self.size = np.diff(members.offset)
        self.start = np.cumsum(self.size) - self.size
        self.rank = members.data.astype(np.int64)
        self.group = np.repeat(np.arange(len(self.size)), self.size)
        self.slot_start = slots.offset
        self.slot_group = slots.data.astype(np.int64)
        self._width = graph.world_size
        keys = self.group * self._width + self.rank
        self._order = np.argsort(keys, kind="stable")
        self._keys, self._sorted = keys[self._order], self.rank[self._order]
        self.repeated = np.zeros(len(keys), bool)
        self.repeated[self._order[1:]] = self._keys[1:] == self._keys[:-1]

    def place(self, group: np.ndarray, rank: np.ndarray) -> np.ndarray:
        """Group rank of each (group, global rank); -1 where the rank is no member."""
        at = self._find(group, rank)
        return np.where(at >= 0, at - self.start[group], -1) if len(self.start) else at

    def in_slot(self, rank: np.ndarray, slot: np.ndarray | int) -> np.ndarray:
        """The group that each rank has in a slot."""
        return self.slot_group[self.slot_start[rank] + slot]

    def places(self, ranks: np.ndarray) -> np.ndarray:
        """int64[n, most slots of any rank]: the group rank in each slot, -1 where a rank has no such slot."""
        count = np.diff(self.slot_start)
        found = np.full((len(ranks), int(count.max(initial=0))), -1)
        row, slot = np.nonzero(np.arange(found.shape[1]) < count[ranks][:, None])
        found[row, slot] = self.place(self.in_slot(ranks[row], slot), ranks[row])
        return found

    def _find(self, group: np.ndarray, rank: np.ndarray) -> np.ndarray:
        """Index of each (group, global rank) among all members; -1: none."""
        if not len(self._keys):
            return np.full(len(group), -1)
        if len(group) < MANY:
            wanted = group * self._width + rank
            at = np.minimum(np.searchsorted(self._keys, wanted), len(self._keys) - 1)
            return np.where(self._keys[at] == wanted, self._order[at], -1)
        found = np.full(len(group), -1)
        bounds = np.append(self.start, len(self._order))
        _look_up(len(group), group, np.broadcast_to(rank, len(group)), bounds, self._sorted, self._order, found)
        return found

    @cached_property
    def slot(self) -> np.ndarray:
        counts = np.diff(self.slot_start)
        rank = np.repeat(np.arange(len(counts)), counts)
        slot = np.arange(len(rank)) - np.repeat(self.slot_start[:-1], counts)
        at = self._find(self.slot_group, rank)
        found = np.full(len(self.rank), -1)
        known = np.flatnonzero(at >= 0)[::-1]  # the first slot is written last
        found[at[known]] = slot[known]
        return found


@Kernel
def _look_up(group, rank, bounds, members, order, found):  # members: of each group in ascending order
    for k in range(len(group)):
        if 0 <= group[k] < len(bounds) - 1:
            low, end = bounds[group[k]], bounds[group[k] + 1]
            high = end
            while low < high:
                middle = (low + high) // 2
                if members[middle] < rank[k]:
                    low = middle + 1
                else:
                    high = middle
            if low < end and members[low] == rank[k]:
                found[k] = order[low]


def concatenated(arrays: list[np.ndarray]) -> np.ndarray:
    """The arrays one after the other, int64."""
    return np.concatenate(arrays).astype(np.int64) if arrays else np.empty(0, np.int64)
