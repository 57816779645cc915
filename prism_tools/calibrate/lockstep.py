"""Ranks that do the same in different times, solved in lockstep: the order of one serves all, each step is a row of ends.

Where every rank was measured by itself no two take equally long, but thousands still run one program in like groups. One
rank of each such class gives matches and order; its ranks are lanes, so that nothing of the size of the whole graph is
made but the durations and the ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from prism_tools.calibrate.solver import begins, waits_in_queues
from prism_tools.graph.classes import Classes
from prism_tools.graph.compiled import Kernel
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
    finder = _Places(coarse, fine, lane)
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

    def __init__(self, coarse: Classes, fine: Classes, lane: np.ndarray) -> None:
        self._members, self._fine, self._lane = coarse.members, fine, lane
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
    gates, before = order.releases, order.programs.before
    end = np.empty(len(gap), np.int64) if end is None else end
    begin, width = matches.base[order.owner], lanes.count[order.owner]
    local = np.arange(len(begin)) - begin
    apart = np.unique(gates.arrivals.data[gates.arrivals.offset[gates.together] :])
    kept = np.full(len(begin), -1, np.int64)
    kept[apart] = np.cumsum(width[apart]) - width[apart]
    place, row = order.programs.first[order.owner] + local, lanes.start[order.owner] + local * width
    arrives = row.copy()
    same = np.flatnonzero((np.diff(before.offset)[place] == 1) & (matches.of_node >= 0) & (kept < 0))
    arrives[same] = row[begin[same] + before.data[before.offset[place[same]]]]  # the end of the only one they wait for
    steps = order.steps[(order.steps < 0) | (arrives == row)[np.maximum(order.steps, 0)]]
    _lockstep(
        len(gap), steps, begin, place, before.offset, before.data,
        matches.of_node, gates.arrivals.offset, gates.arrivals.data, gates.leavers.offset, gates.leavers.data,
        gates.together, width, row, arrives, lanes.place, lanes.places, kept,
        np.empty(int(width[apart].sum()), np.int64), lanes.meetings, gap, end,
    )  # fmt: skip
    return end


class Lockstep:
    """A graph solved in lanes: ``block(k)``: int64[nodes, lanes], ends of the lanes of class k of ``matches.classes``."""

    def __init__(self, graph: Graph, matches: Matches, order: Order, durations: Durations, fine: Classes) -> None:
        self._graph, self._matches, self._order, self._durations = graph, matches, order, durations
        self.lanes = lanes_of(graph, matches, order, fine)
        self._end = ends(matches, order, self.lanes, gaps(graph, matches, self.lanes, durations))
        leavers = order.releases.leavers
        self._gate = np.full(int(matches.base[-1]), -1, np.int64)
        self._gate[leavers.data] = np.repeat(np.arange(len(leavers)), np.diff(leavers.offset))

    def block(self, k: int) -> np.ndarray:
        nodes, start = int(self._matches.base[k + 1] - self._matches.base[k]), int(self.lanes.start[k])
        return self._end[start : start + nodes * int(self.lanes.count[k])].reshape(nodes, -1)

    def times(self) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """As solver.times, one array for each class of ``fine``."""
        starts: list[np.ndarray] = [np.empty(0)] * len(self.lanes.rank)
        finish = list(starts)
        for k, rank in enumerate(self._matches.classes.lowest.tolist()):
            end = np.ascontiguousarray(self.block(k).T)
            matched = np.flatnonzero(self._matches.of_node[self._matches.base[k] : self._matches.base[k + 1]] >= 0)
            arrival = np.zeros((len(matched), len(end)), np.int64)
            for at, node in enumerate(matched.tolist()):
                before = self._before(k, node)
                if len(before):
                    arrival[at] = self.block(k)[before].max(axis=0)
            queues = waits_in_queues(self._graph.programs[self._graph.ranks.program[rank]], self._graph.lanes)
            for lane, row in enumerate(end):
                lane_rank = int(self.lanes.rank[self.lanes.first[k] + lane])
                start = begins(row, self._durations.own[self._durations.row[lane_rank]], queues)
                start[matched] = arrival[:, lane]
                at = int(self.lanes.fine.of_rank[lane_rank])
                starts[at], finish[at] = start, row
        return starts, finish

    def walk(self, rank: int, node: int, inside: np.ndarray) -> np.ndarray:
        """As solver.walk, from ``node`` of ``rank`` back; ``inside``: bool per flat node of ``matches``."""
        k = int(self._matches.classes.of_rank[rank])
        place: tuple[int, int, int] | None = (k, int(np.flatnonzero(self._lane_ranks(k) == rank)[0]), node)
        path: list[tuple[int, int, int, bool]] = []
        while place is not None and inside[self._matches.base[place[0]] + place[2]]:
            path.append((*place, False))
            last = self._last(*place)
            if last != place:
                if not inside[self._matches.base[last[0]] + last[2]]:
                    break
                path.append((*last, True))
            k, lane, node = last
            before = self._before(k, node)
            place = (k, lane, int(before[np.argmax(self.block(k)[before, lane])])) if len(before) else None
        rows = [(self._lane_ranks(k)[lane], node, jump) for k, lane, node, jump in path[::-1]]
        return np.array(rows, np.int64).reshape(-1, 3)

    def _lane_ranks(self, k: int) -> np.ndarray:
        return self.lanes.rank[self.lanes.first[k] : self.lanes.first[k] + self.lanes.count[k]]

    def _before(self, k: int, node: int) -> np.ndarray:
        return self._order.programs.before[self._order.programs.first[k] + node]

    def _last(self, k: int, lane: int, node: int) -> tuple[int, int, int]:
        """Class, lane and node of the member whose arrival let this node go: itself, if it is in no match."""
        base, lanes = self._matches.base, self.lanes
        gate = int(self._gate[base[k] + node])
        if gate < 0:
            return k, lane, node
        releases = self._order.releases
        here = lanes.places[lanes.place[base[k] + node] + lane]
        found: tuple[int, tuple[int, int, int]] | None = None
        for member in releases.arrivals[gate].tolist():
            other = int(self._order.owner[member])
            local = int(member - base[other])
            if gate >= releases.together and (other, local) == (k, node):
                chosen = np.array([lane])
            else:
                begin = int(lanes.place[member])
                chosen = np.flatnonzero(lanes.places[begin : begin + int(lanes.count[other])] == here)
            before = self._before(other, local)
            arrival = self.block(other)[before[:, None], chosen].max(axis=0, initial=0)
            if len(chosen) and (found is None or arrival.max() > found[0]):
                found = int(arrival.max()), (other, int(chosen[np.argmax(arrival)]), local)
        assert found is not None
        return found[1]


@Kernel
def _lockstep(
    steps, begin, node, before_at, before, of_node, arrive_at, arrive, leave_at, leave, together, width, row, arrives,
    place, places, kept, arrival, meetings, gap, end,
):  # fmt: skip
    """A node that takes part in a match holds its arrival in ``end`` until it leaves, in row ``arrives``; if it does not
    leave with all others at once, its arrival is in ``arrival`` too."""
    met = np.empty(meetings.max() if len(meetings) else 0, np.int64)
    for step in steps:
        if step >= 0:
            mine = end[row[step] : row[step] + width[step]]
            low, high = before_at[node[step]], before_at[node[step] + 1]
            more = gap[row[step] : row[step] + width[step]]
            if low == high:
                for lane in range(len(mine)):
                    mine[lane] = more[lane] if of_node[step] < 0 else 0
            for at in range(low, high):
                source = begin[step] + before[at]
                theirs = end[row[source] : row[source] + width[source]]
                if of_node[step] < 0 and at == low:
                    for lane in range(len(mine)):
                        mine[lane] = theirs[lane] + more[lane]
                elif of_node[step] < 0:
                    for lane in range(len(mine)):
                        mine[lane] = max(mine[lane], theirs[lane] + more[lane])
                elif at == low:
                    mine[:] = theirs
                else:
                    for lane in range(len(mine)):
                        mine[lane] = max(mine[lane], theirs[lane])
            if kept[step] >= 0:
                arrival[kept[step] : kept[step] + width[step]] = mine
            continue
        gate = -step - 1
        apart = gate >= together
        leaver = leave[leave_at[gate]]
        met[: meetings[leaver]] = 0
        for at in range(arrive_at[gate], arrive_at[gate + 1]):
            member = arrive[at]
            theirs = arrival[kept[member] :] if apart else end[arrives[member] :]
            where = places[place[member] : place[member] + width[member]]
            if not (apart and member == leaver):
                for lane in range(len(where)):
                    met[where[lane]] = max(met[where[lane]], theirs[lane])
        for at in range(leave_at[gate], leave_at[gate + 1]):
            member = leave[at]
            mine, more = end[row[member] :], gap[row[member] :]
            where = places[place[member] : place[member] + width[member]]
            for lane in range(len(where)):  # who leaves alone still has its arrival in ``end``
                latest = met[where[lane]]
                mine[lane] = (max(mine[lane], latest) if apart else latest) + more[lane]
