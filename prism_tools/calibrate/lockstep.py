"""Ranks that do the same in different times, solved in lockstep: the order of one serves all, each step is a row of ends.

Where every rank was measured by itself no two take equally long, but thousands still run one program in like groups. One
rank of each such class gives matches and order; its ranks are lanes, so that nothing of the size of the whole graph is
made but the durations and the ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from prism_tools.graph.classes import Classes
from prism_tools.graph.compiled import Kernel
from prism_tools.graph.members import Members
from prism_tools.graph.model import Durations, Graph
from prism_tools.graph.schema import P2P, Op

if TYPE_CHECKING:
    from prism_tools.graph.match import Matches
    from prism_tools.graph.order import Order


@dataclass
class Lanes:
    """The lanes of ``matches.classes``: lane l of class k is rank ``rank[first[k] + l]``, which stands for those of its
    class in ``fine``. The ends of a node of class k are a row of ``count[k]`` lanes; rows begin at ``start[k]``.

    Lanes of one match meet where their places are equal. ``place``: int64, per flat node: where the places of its lanes
    begin in ``places`` (int32; -1 if it has no match). ``meetings``: int64, per flat node: how many places there are.
    """

    fine: Classes
    rank: np.ndarray
    first: np.ndarray
    count: np.ndarray
    start: np.ndarray
    place: np.ndarray
    places: np.ndarray
    meetings: np.ndarray


def lanes_of(graph: Graph, matches: Matches, order: Order, fine: Classes) -> Lanes:
    """The lanes of ``matches``, one for each class of ``fine``, which tells apart all that ``matches.classes`` does."""
    coarse = matches.classes
    owner = coarse.of_rank[fine.lowest]
    rank = fine.lowest[np.argsort(owner, kind="stable")].astype(np.int64)
    count = np.bincount(owner, minlength=len(coarse)).astype(np.int64)
    first = np.cumsum(count) - count
    sizes = count * np.diff(matches.base)
    lane = np.empty(len(fine), np.int64)
    lane[fine.of_rank[rank]] = np.arange(len(rank)) - np.repeat(first, count)
    finder = _Places(graph, Members(graph), coarse, fine, lane)
    place = np.full(int(matches.base[-1]), -1, np.int64)
    meetings = place * 0
    tables: list[np.ndarray] = []
    size = 0
    nodes = np.flatnonzero(matches.of_node >= 0)
    where = order.owner[nodes]
    for k in range(len(coarse)):
        mine = nodes[where == k]
        program, ranks = graph.program_of(int(coarse.lowest[k])), rank[first[k] : first[k] + count[k]]
        local = mine - matches.base[k]
        pair = np.isin(program.op[local], P2P)
        receives = pair & (program.op[local] == Op.RECV)
        keys = np.stack([program.slot[local], np.where(pair, program.peer[local], -1), receives], 1)
        distinct, back = np.unique(keys, axis=0, return_inverse=True)
        place[mine] = size + back.reshape(-1) * len(ranks)
        size += len(distinct) * len(ranks)
        found = [finder.find(ranks, *key) for key in distinct.tolist()]
        tables += [table for table, _ in found]
        meetings[mine] = np.array([many for _, many in found], np.int64)[back.reshape(-1)]
    places = np.concatenate([np.empty(0, np.int32), *tables]).astype(np.int32)
    return Lanes(fine, rank, first, count, np.cumsum(sizes) - sizes, place, places, meetings)


class _Places:
    """Where lanes meet: those of a collective at their group's class, those of a pair at the sender's lane."""

    def __init__(self, graph: Graph, members: Members, coarse: Classes, fine: Classes, lane: np.ndarray) -> None:
        self._members, self._fine, self._lane = members, fine, lane
        both = coarse.of_group.astype(np.int64) * (int(fine.of_group.max(initial=0)) + 1) + fine.of_group
        distinct, number = np.unique(both, return_inverse=True)
        of_distinct = distinct // (int(fine.of_group.max(initial=0)) + 1)
        self._many = np.bincount(of_distinct)[coarse.of_group]
        self._number = number - np.searchsorted(of_distinct, coarse.of_group)  # from 0 within each coarse class

    def find(self, ranks: np.ndarray, slot: int, peer: int, receives: int) -> tuple[np.ndarray, int]:
        """Places of ``ranks`` in a collective (``peer`` < 0) or pair, and how many there are."""
        members, group = self._members, self._members.in_slot(ranks, slot)
        if peer < 0:
            return self._number[group], int(self._many[group[0]])
        if receives:
            ranks = members.rank[members.start[group] + (members.place(group, ranks) + peer) % members.size[group]]
        return self._lane[self._fine.of_rank[ranks]], len(ranks)


def gaps(graph: Graph, matches: Matches, lanes: Lanes, durations: Durations) -> np.ndarray:
    """What each node adds to the latest that it waits for, ns, in the layout of the ends; int32 if all of them fit."""
    most = max(
        (int((own + tail).max(initial=0)) for own, tail in zip(durations.own, durations.tail, strict=True)), default=0
    )
    total = int(lanes.count @ np.diff(matches.base))
    gap = np.empty(total, np.int32 if most < 2**31 else np.int64)
    for k, count in enumerate(lanes.count.tolist()):
        rows = durations.row[lanes.rank[lanes.first[k] : lanes.first[k] + count]].tolist()
        nodes = int(matches.base[k + 1] - matches.base[k])
        block = gap[lanes.start[k] : lanes.start[k] + nodes * count].reshape(nodes, count)
        for lane in range(0, count, 64):  # columns in small groups, which stay in the cache
            some = rows[lane : lane + 64]
            block[:, lane : lane + 64] = np.stack([durations.own[row] + durations.tail[row] for row in some], 1)
    return gap


def ends(matches: Matches, order: Order, lanes: Lanes, gap: np.ndarray, end: np.ndarray | None = None) -> np.ndarray:
    """int64 ns: the end of every node in every lane; written to ``end`` if given."""
    gates = order.releases
    end = np.empty(len(gap), np.int64) if end is None else end
    apart = gates.arrivals.data[gates.arrivals.offset[gates.together] :]
    kept = np.full(len(order.owner), -1, np.int64)
    apart = np.unique(apart)
    width = lanes.count[order.owner[apart]]
    kept[apart] = np.cumsum(width) - width
    before = order.programs.before
    _lockstep(
        len(gap), order.steps, order.base, order.owner, order.programs.first, before.offset, before.data,
        matches.of_node, gates.arrivals.offset, gates.arrivals.data, gates.leavers.offset, gates.leavers.data,
        gates.together, lanes.count, lanes.start, lanes.place, lanes.places, kept,
        np.empty(int(width.sum()), np.int64), lanes.meetings, gap, end,
    )  # fmt: skip
    return end


@Kernel
def _lockstep(
    steps, base, owner, first, before_at, before, of_node, arrive_at, arrive, leave_at, leave, together, count, start,
    place, places, kept, arrival, meetings, gap, end,
):  # fmt: skip
    """A node that takes part in a match holds its arrival in ``end`` until it leaves; if it does not leave with all
    others at once, its arrival is in ``arrival`` too."""
    met = np.empty(meetings.max() if len(meetings) else 0, np.int64)
    for step in steps:
        if step >= 0:
            k = owner[step]
            width = count[k]
            row = start[k] + (step - base[k]) * width
            mine = end[row : row + width]
            node = first[k] + step - base[k]
            low, high = before_at[node], before_at[node + 1]
            if low == high:
                mine[:] = 0
            for at in range(low, high):
                row_before = start[k] + before[at] * width
                theirs = end[row_before : row_before + width]
                if at == low:
                    for lane in range(width):
                        mine[lane] = theirs[lane]
                else:
                    for lane in range(width):
                        mine[lane] = max(mine[lane], theirs[lane])
            if of_node[step] < 0:
                more = gap[row : row + width]
                for lane in range(width):
                    mine[lane] += more[lane]
            elif kept[step] >= 0:
                arrival[kept[step] : kept[step] + width] = mine
            continue
        gate = -step - 1
        met[: meetings[leave[leave_at[gate]]]] = 0
        for at in range(arrive_at[gate], arrive_at[gate + 1]):
            member = arrive[at]
            if gate >= together and member == leave[leave_at[gate]]:
                continue
            k = owner[member]
            width = count[k]
            row = start[k] + (member - base[k]) * width
            theirs = end[row : row + width]
            if gate >= together:
                theirs = arrival[kept[member] : kept[member] + width]
            where = places[place[member] : place[member] + width]
            for lane in range(width):
                met[where[lane]] = max(met[where[lane]], theirs[lane])
        for at in range(leave_at[gate], leave_at[gate + 1]):
            member = leave[at]
            k = owner[member]
            width = count[k]
            row = start[k] + (member - base[k]) * width
            mine, more = end[row : row + width], gap[row : row + width]
            where = places[place[member] : place[member] + width]
            if gate < together:
                for lane in range(width):
                    mine[lane] = met[where[lane]] + more[lane]
            else:
                own = arrival[kept[member] : kept[member] + width]
                for lane in range(width):
                    mine[lane] = max(own[lane], met[where[lane]]) + more[lane]
