"""The exact solve: integer longest path over the graph's equations, and which predecessor was binding everywhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from prism_tools.graph.equations import Binding, evaluated
from prism_tools.graph.model import Durations, Graph, Program
from prism_tools.graph.order import predecessors
from prism_tools.graph.schema import Kind

if TYPE_CHECKING:
    from prism_tools.graph.match import Matches
    from prism_tools.graph.order import Order


@dataclass
class Solution:
    """Solved variables of graph/equations.py: value (int64, ns) and which source was latest."""

    value: np.ndarray
    binding: Binding


def evaluate(graph: Graph, matches: Matches, order: Order, durations: Durations) -> Solution:
    """The least solution: every variable as early as its equation allows, every rank's first node ready at 0."""
    value = evaluated(matches, order, durations)
    return Solution(value, Binding(matches, order, value))


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
    total = int(matches.base[-1])
    starts, ends = [], []
    queues = [_queues(program, graph.lanes) for program in graph.programs]
    for at, rank in enumerate(matches.classes.lowest.tolist()):
        base, top = int(matches.base[at]), int(matches.base[at + 1])
        end = solution.value[base:top]
        matched = matches.of_node[base:top] >= 0
        arrival = solution.value[total + base : total + top]
        start = np.where(matched, arrival, end - durations.own[durations.row[rank]])
        waits, source, target = queues[graph.ranks.program[rank]]
        start[waits] = 0
        np.maximum.at(start, target, end[source])
        starts.append(start)
        ends.append(end)
    return starts, ends


def _queues(program: Program, lanes: list[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
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
    total = int(matches.base[-1])
    path: list[int] = []
    variable = last
    while variable >= 0:
        if variable < 2 * total:  # releases belong to no node
            node = variable % total
            if not inside[node]:
                break
            if not path or path[-1] != node:
                path.append(node)
        variable = solution.binding[variable]
    nodes = np.array(path[::-1], np.int64)
    owner = np.searchsorted(matches.base, nodes, side="right") - 1
    return np.stack([matches.classes.lowest[owner].astype(np.int64), nodes - matches.base[owner]], 1)
