"""The exact solve: integer longest path over the graph's equations, and which predecessor was binding everywhere."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from prism_tools.graph.classes import Classes
from prism_tools.graph.equations import Binding
from prism_tools.graph.model import Durations, Graph, Program
from prism_tools.graph.order import predecessors
from prism_tools.graph.schema import P2P, Kind
from prism_tools.graph.worklist import arrivals, ends

if TYPE_CHECKING:
    from prism_tools.graph.match import Matches
    from prism_tools.graph.order import Order


@dataclass
class Solution:
    """Solved variables of graph/equations.py, int64 ns by flat node: ends; and, found when asked for, the arrivals of those
    in a match, and which source was latest."""

    order: Order
    end: np.ndarray

    @cached_property
    def arrival(self) -> np.ndarray:
        return arrivals(self.order, self.end)

    @cached_property
    def binding(self) -> Binding:
        return Binding(self.order, self.end, self.arrival)


def evaluate(graph: Graph, matches: Matches, order: Order, durations: Durations) -> Solution:
    """The least solution: every variable as early as its equation allows, every rank's first node ready at 0.

    Ranks of one of ``matches.classes`` must have the same row of durations (``timeline`` takes others too).
    """
    return Solution(order, ends(order, durations))


def solve(
    graph: Graph, matches: Matches, order: Order, durations: Durations
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Start and end of every node, one int64 ns array per rank (of those that stand for ``matches.classes``), on one
    clock that begins at 0.

    A communication node starts when it arrives; a wait when its lane reaches it; others when all they wait for is over.
    """
    return times(graph, matches, order, evaluate(graph, matches, order, durations), durations)


def times(
    graph: Graph, matches: Matches, order: Order, solution: Solution, durations: Durations
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """``solve``'s answer from an evaluated solution."""
    starts, finish = [], []
    queues = [waits_in_queues(program, graph.lanes) for program in graph.programs]
    for at, rank in enumerate(matches.classes.lowest.tolist()):
        base, top = int(matches.base[at]), int(matches.base[at + 1])
        end = solution.end[base:top]
        matched = matches.of_node[base:top] >= 0
        arrival = solution.arrival[base:top]
        start = begins(end, durations.own[durations.row[rank]], queues[graph.ranks.program[rank]])
        starts.append(np.where(matched, arrival, start))
        finish.append(end)
    return starts, finish


def begins(end: np.ndarray, own: np.ndarray, queues: tuple[np.ndarray, np.ndarray, np.ndarray]) -> np.ndarray:
    """The starts of one rank's nodes that are in no match, from their ends; ``queues`` of waits_in_queues."""
    waits, source, target = queues
    start = end - own
    start[waits] = 0
    np.maximum.at(start, target, end[source])
    return start


def waits_in_queues(program: Program, lanes: list[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The waits, and (source, target) of all that waits follow on their own lane."""
    waits = np.flatnonzero(program.kind == Kind.WAIT)
    source, target = predecessors(program, lanes)
    chosen = (program.kind[target] == Kind.WAIT) & (program.lane[source] == program.lane[target])
    return waits, source[chosen], target[chosen]


def critical_path(solution: Solution, matches: Matches, last: int, inside: np.ndarray) -> np.ndarray:
    """int64[n, 2] of (rank, node): what made flat node ``last`` end when it did, first to last.

    ``inside``: bool per flat node; the walk back ends before the first node that is not inside. Where the path goes
    from one member of a match to another, both are listed, the one that arrived last before the one that goes on.
    """
    return walk(solution, matches, last, inside)[:, :2]


def walk(solution: Solution, matches: Matches, last: int, inside: np.ndarray) -> np.ndarray:
    """int64[n, 3]: as critical_path, and whether the path goes on in another member of this node's match."""
    total = int(matches.base[-1])
    path: list[tuple[int, bool]] = []
    variable, released = last, False
    while variable >= 0:
        if variable < 2 * total:  # releases belong to no node
            node = variable % total
            if not inside[node]:
                break
            if not path or path[-1][0] != node:
                path.append((node, released))
        released = variable >= 2 * total
        variable = solution.binding[variable]
    flat, jump = np.array(path[::-1], np.int64).reshape(-1, 2).T
    owner = np.searchsorted(matches.base, flat, side="right") - 1
    return np.stack([matches.classes.lowest[owner].astype(np.int64), flat - matches.base[owner], jump], 1)


def among_all(graph: Graph, classes: Classes, path: np.ndarray) -> np.ndarray:
    """int64[n, 2]: the path of ``walk`` through one rank of each class, through ranks that really share a group."""
    if not len(path) or len(classes) == graph.world_size:
        return path[:, :2]
    members, found = classes.members, path[:, :2].copy()
    for at in range(len(path) - 2, -1, -1):
        rank, node, jump = path[at].tolist()
        here, there = found[at + 1].tolist()
        found[at, 0] = here
        if jump:
            program, slots = graph.program_of(here), graph.ranks.slots
            group = slots[here][program.slot[there]]
            ranks = graph.groups.members[group]
            if program.op[there] in P2P:
                found[at, 0] = ranks[(np.flatnonzero(ranks == here)[0] + program.peer[there]) % len(ranks)]
                continue
            slot = int(graph.program_of(rank).slot[node])
            alike = ranks[classes.of_rank[ranks] == classes.of_rank[rank]]
            found[at, 0] = alike[members.in_slot(alike, slot) == group][0]
    return found
