"""Where iterations end, which of them count, and how long they took on one rank."""

from __future__ import annotations

import numpy as np

from prism_tools.graph.model import Graph, Program
from prism_tools.graph.schema import UNKNOWN, Kind, Op


def last_nodes(program: Program) -> np.ndarray:
    """int64[iterations]: the node that ends each iteration: its last optimizer step, or without steps its last node."""
    count = int(program.segment.max(initial=-1)) + 1
    marks = (program.kind == Kind.MARK) & (program.op == Op.OPTIMIZER_STEP)
    last = np.empty(count, np.int64)
    for k in range(count):
        nodes = np.flatnonzero(program.segment == k)
        steps = nodes[marks[nodes]]
        last[k] = (steps if len(steps) else nodes)[-1]
    return last


def counted(graph: Graph) -> range:
    """The iterations that statistics are made of: after warm-up and never the first; if none is left, the last."""
    count = graph.iterations()
    first = max(1, graph.launch.warmup)
    return range(min(first, max(count - 1, 0)), count)


def iteration_times(program: Program, start: np.ndarray, end: np.ndarray, chosen: range) -> np.ndarray:
    """int64[len(chosen)]: time of each chosen iteration, from the end of the one before (iteration 0: from its first
    node's start); UNKNOWN where either time is."""
    last = last_nodes(program)
    times = np.full(len(chosen), UNKNOWN, np.int64)
    for at, k in enumerate(chosen):
        since = end[last[k - 1]] if k else start[np.flatnonzero(program.segment == 0)[0]]
        if since != UNKNOWN and end[last[k]] != UNKNOWN:
            times[at] = end[last[k]] - since
    return times
