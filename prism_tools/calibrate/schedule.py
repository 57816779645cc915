"""The calibrated timeline: solved times, the iteration time with its interval, and the critical path."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from prism_tools.calibrate.measured import read_rows
from prism_tools.calibrate.solver import critical_path, evaluate, times
from prism_tools.graph.equations import flat
from prism_tools.graph.iterations import counted, iteration_times, last_nodes
from prism_tools.graph.model import Durations, Graph, Timeline
from prism_tools.graph.own import own_times
from prism_tools.graph.schema import EPILOGUE, UNKNOWN

if TYPE_CHECKING:
    from prism_tools.graph.match import Matches
    from prism_tools.graph.order import Order


def timeline(graph: Graph, matches: Matches, order: Order, durations: Durations) -> Timeline:
    """Solve ``graph`` with ``durations`` (its own, or changed ones).

    A graph without iterations has iteration and interval time UNKNOWN, and the critical path of the whole program.
    """
    solution = evaluate(graph, matches, order, durations)
    starts, ends = times(graph, matches, order, solution, durations)
    chosen, classes = counted(graph), matches.classes
    per_class = [
        iteration_times(graph.program_of(rank), start, end, chosen)
        for rank, start, end in zip(classes.lowest.tolist(), starts, ends, strict=True)
    ]
    last, inside = _window(graph, matches, ends, chosen)
    critical = critical_path(solution, matches, last, inside) if last >= 0 else np.empty((0, 2), np.int64)
    row, start_rows, end_rows = _packed(starts, ends)
    row = row[classes.of_rank]
    if not len(chosen):
        return Timeline(row, start_rows, end_rows, np.empty(0, np.int64), UNKNOWN, UNKNOWN, critical)
    # The mean over all ranks, in integers, so that it does not depend on how they are classed.
    sums = np.bincount(classes.of_rank, minlength=len(classes)) @ np.array(per_class)
    iteration_ns = np.rint(sums / graph.world_size).astype(np.int64)
    mean = round(int(sums.sum()) / (graph.world_size * len(chosen)))
    interval = _interval(graph, matches, durations, iteration_ns, critical)
    return Timeline(row, start_rows, end_rows, iteration_ns, mean, interval, critical)


def _window(graph: Graph, matches: Matches, ends: list[np.ndarray], chosen: range) -> tuple[int, np.ndarray]:
    """The flat node that ends the last counted iteration on the slowest rank, and which nodes the iterations hold."""
    total = int(matches.base[-1])
    if not len(chosen):
        return (int(np.argmax(np.concatenate(ends))) if total else -1), np.ones(total, bool)
    program = graph.ranks.program[matches.classes.lowest]
    inside = flat([(p.segment >= chosen[0]) | (p.segment == EPILOGUE) for p in graph.programs], program)
    closing = np.array([last_nodes(p)[chosen[-1]] for p in graph.programs])[program]
    slowest = int(np.argmax([end[node] for end, node in zip(ends, closing, strict=True)]))
    return int(matches.base[slowest] + closing[slowest]), inside


def _interval(
    graph: Graph, matches: Matches, durations: Durations, iteration_ns: np.ndarray, critical: np.ndarray
) -> int:
    """Half-width: variation between iterations (two standard errors), spread of the durations on the critical path, and
    disagreement between the runs of a rank, combined in quadrature; UNKNOWN from one iteration of one run."""
    count = len(iteration_ns)
    between = 2 * float(np.std(iteration_ns, ddof=1)) / math.sqrt(count) if count > 1 else 0.0
    rank, node = critical.T
    match = matches.of_node[matches.base[matches.classes.of_rank[rank]] + node]
    once = np.append((match[1:] < 0) | (match[1:] != match[:-1]), True)[: len(node)]  # a jump lists two members
    row = np.cumsum([0, *(len(spread) for spread in durations.spread)])[durations.row[rank]]
    spread = np.concatenate(durations.spread)[(row + node)[once]].astype(float)
    path = math.sqrt(float(np.sum(spread**2))) / count
    disagreement = _disagreement(graph, sorted(set(critical[:, 0].tolist())))
    if count == 1 and not disagreement:
        return UNKNOWN
    return round(math.hypot(between, path, disagreement))


def _disagreement(graph: Graph, ranks: list[int]) -> float:
    """Half the range, over the runs of a rank, of its own time per counted iteration; the mean over those of ``ranks``
    that were measured more than once; 0 if none was."""
    if graph.timing is None or not len(graph.timing.rank):
        return 0.0
    measured, chosen, halves = read_rows(graph), counted(graph), []
    for rank in ranks:
        program, rows = graph.program_of(rank), measured.rows[rank]
        if len(rows) < 2:
            continue
        nodes = np.isin(program.segment, np.array(chosen))
        sums = [np.nansum(own_times(program, measured.start[row], measured.end[row])[nodes]) for row in rows]
        halves.append((max(sums) - min(sums)) / 2 / len(chosen))
    return float(np.mean(halves)) if halves else 0.0


def _packed(starts: list[np.ndarray], ends: list[np.ndarray]) -> tuple[np.ndarray, list[np.ndarray], list[np.ndarray]]:
    """Ranks with equal times share a row."""
    known: dict[bytes, int] = {}
    row = np.zeros(len(starts), np.int32)
    start_rows: list[np.ndarray] = []
    end_rows: list[np.ndarray] = []
    for rank, (start, end) in enumerate(zip(starts, ends, strict=True)):
        row[rank] = known.setdefault(start.tobytes() + end.tobytes(), len(known))
        if row[rank] == len(start_rows):
            start_rows.append(start)
            end_rows.append(end)
    return row, start_rows, end_rows
