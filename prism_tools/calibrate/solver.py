"""The exact solve: integer longest path over the graph's equations, and which predecessor was binding everywhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from prism_tools.graph.equations import equations
from prism_tools.graph.model import Durations, Graph
from prism_tools.graph.schema import Kind

if TYPE_CHECKING:
    from prism_tools.graph.match import Matches
    from prism_tools.graph.order import Order


@dataclass
class Solution:
    """Solved variables of graph/equations.py: value (ns) and the source that was latest (-1: none, ready at 0)."""

    value: list[int]
    binding: list[int]


def evaluate(graph: Graph, matches: Matches, order: Order, durations: Durations) -> Solution:
    """The least solution: every variable as early as its equation allows, every rank's first node ready at 0."""
    total = int(matches.base[-1])
    size = 2 * total + len(order.releases)
    value, binding = [0] * size, [-1] * size
    for target, sources, delay in equations(graph, matches, order, durations):
        latest, why = 0, -1
        for source in sources:
            if value[source] > latest or why < 0:
                latest, why = value[source], source
        value[target], binding[target] = latest + delay, why
    return Solution(value, binding)


def solve(
    graph: Graph, matches: Matches, order: Order, durations: Durations
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Start and end of every node, one int64 ns array per rank, on one clock that begins at 0.

    A communication node starts when it arrives; a wait when its lane reaches it; others when all they wait for is over.
    """
    return times(graph, matches, order, evaluate(graph, matches, order, durations), durations)


def times(
    graph: Graph, matches: Matches, order: Order, solution: Solution, durations: Durations
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """``solve``'s answer from an evaluated solution."""
    total = int(matches.base[-1])
    value = np.array(solution.value[: 2 * total], np.int64)
    starts, ends = [], []
    for rank in range(graph.world_size):
        base, top = int(matches.base[rank]), int(matches.base[rank + 1])
        end = value[base:top]
        matched = matches.of_node[base:top] >= 0
        start = np.where(matched, value[total + base : total + top], end - durations.own[durations.row[rank]])
        program = graph.program_of(rank)
        for node in np.flatnonzero(program.kind == Kind.WAIT).tolist():
            preds = order.preds[base + node] - base
            queue = preds[program.lane[preds] == program.lane[node]]
            start[node] = end[queue].max(initial=0)
        starts.append(start)
        ends.append(end)
    return starts, ends


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
    path.reverse()
    return np.array([(matches.rank_of(node), matches.node_of(node)) for node in path], np.int64).reshape(-1, 2)
