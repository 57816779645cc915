"""The calibrated timeline: solved times, the iteration time with its interval, and the critical path."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from prism_tools.calibrate.lockstep import Lockstep
from prism_tools.calibrate.measured import read_rows
from prism_tools.calibrate.solver import among_all, evaluate, times, walk
from prism_tools.graph.classes import Classes, classes_of
from prism_tools.graph.equations import flat
from prism_tools.graph.iterations import counted, iteration_times, last_nodes
from prism_tools.graph.model import Durations, Graph, Timeline
from prism_tools.graph.own import own_times
from prism_tools.graph.schema import EPILOGUE, UNKNOWN

if TYPE_CHECKING:
    from prism_tools.graph.match import Matches
    from prism_tools.graph.order import Order


def timeline(graph: Graph, matches: Matches, order: Order, durations: Durations) -> Timeline:
    """Solve ``graph`` with ``durations`` (its own, or changed ones), which may differ within ``matches.classes``.

    A graph without iterations has iteration and interval time UNKNOWN, and the critical path of the whole program.
    """
    chosen, classes = counted(graph), matches.classes
    whole = np.array_equal(durations.row, durations.row[classes.lowest[classes.of_rank]])
    solved = _Whole(graph, matches, order, durations) if whole else _InLanes(graph, matches, order, durations)
    classes, starts, ends = solved.classes, solved.starts, solved.ends
    inside = _inside(graph, matches, chosen)
    last = _last(graph, classes, ends, chosen)
    path = solved.walk(*last, inside) if last else np.empty((0, 3), np.int64)
    critical = among_all(graph, classes, path)
    row, start_rows, end_rows = _packed(starts, ends)
    row = row[classes.of_rank]
    if not len(chosen):
        return Timeline(row, start_rows, end_rows, np.empty(0, np.int64), UNKNOWN, UNKNOWN, critical)
    lowest = classes.lowest.tolist()
    per_class = [
        iteration_times(graph.program_of(rank), start, end, chosen)
        for rank, start, end in zip(lowest, starts, ends, strict=True)
    ]
    # The mean over all ranks, in integers, so that it does not depend on how they are classed.
    sums = np.bincount(classes.of_rank, minlength=len(classes)) @ np.array(per_class)
    iteration_ns = np.rint(sums / graph.world_size).astype(np.int64)
    mean = round(int(sums.sum()) / (graph.world_size * len(chosen)))
    interval = _interval(graph, matches, durations, iteration_ns, critical)
    return Timeline(row, start_rows, end_rows, iteration_ns, mean, interval, critical)


class _Whole:
    """Solved with one rank for each class of the matches."""

    def __init__(self, graph: Graph, matches: Matches, order: Order, durations: Durations) -> None:
        self.classes, self._matches = matches.classes, matches
        self._solution = evaluate(graph, matches, order, durations)
        self.starts, self.ends = times(graph, matches, order, self._solution, durations)

    def walk(self, rank: int, node: int, inside: np.ndarray) -> np.ndarray:
        last = int(self._matches.base[self.classes.of_rank[rank]]) + node
        return walk(self._solution, self._matches, last, inside)


class _InLanes:
    """Solved in lockstep: ranks of a class of the matches have durations of their own."""

    def __init__(self, graph: Graph, matches: Matches, order: Order, durations: Durations) -> None:
        coarse = matches.classes
        self.classes = classes_of(graph, durations.row.astype(np.int64) * len(coarse) + coarse.of_rank)
        solved = Lockstep(graph, matches, order, durations, self.classes)
        self.starts, self.ends = solved.times()
        self.walk = solved.walk


def _inside(graph: Graph, matches: Matches, chosen: range) -> np.ndarray:
    """Which flat nodes the counted iterations hold: all, if there are none."""
    first = chosen[0] if len(chosen) else np.iinfo(np.int32).min
    rows = [(program.segment >= first) | (program.segment == EPILOGUE) for program in graph.programs]
    return flat(rows, graph.ranks.program[matches.classes.lowest])


def _last(graph: Graph, classes: Classes, ends: list[np.ndarray], chosen: range) -> tuple[int, int] | None:
    """(rank, node) that ends the last counted iteration on the slowest rank, or the program."""
    closing = [last_nodes(p)[chosen[-1]] if len(chosen) else -1 for p in graph.programs]
    lowest, slowest = classes.lowest.tolist(), None
    for rank, end in zip(lowest, ends, strict=True):
        node = closing[graph.ranks.program[rank]] if len(chosen) else int(np.argmax(end)) if len(end) else -1
        if node >= 0 and (slowest is None or end[node] > slowest[0]):
            slowest = end[node], rank, int(node)
    return slowest[1:] if slowest else None


def _interval(
    graph: Graph, matches: Matches, durations: Durations, iteration_ns: np.ndarray, critical: np.ndarray
) -> int:
    """Half-width: variation between iterations (two standard errors), spread and bias of the durations on the critical path,
    and disagreement between the runs of a rank or those that stand for it, combined in quadrature; UNKNOWN from one iteration
    of one run. What is wrong by the same each time adds up."""
    count = len(iteration_ns)
    between = 2 * float(np.std(iteration_ns, ddof=1)) / math.sqrt(count) if count > 1 else 0.0
    rank, node = critical.T
    match = matches.of_node[matches.base[matches.classes.of_rank[rank]] + node]
    once = np.append((match[1:] < 0) | (match[1:] != match[:-1]), True)[: len(node)]  # a jump lists two members
    place = (np.cumsum([0, *(len(spread) for spread in durations.spread)])[durations.row[rank]] + node)[once]
    spread, bias = (np.concatenate(rows)[place].astype(float) for rows in (durations.spread, durations.bias))
    path = math.hypot(float(np.sqrt(np.sum(spread**2))), float(np.sum(bias))) / count
    disagreement = _disagreement(graph, sorted(set(critical[:, 0].tolist())))
    if count == 1 and not disagreement:
        return UNKNOWN
    return round(math.hypot(between, path, disagreement))


def _disagreement(graph: Graph, ranks: list[int]) -> float:
    """Half the range, over the runs of a rank or of all that could stand in for it, of its own time per counted iteration;
    the mean over those of ``ranks`` with more than one; 0 if there is none."""
    if graph.timing is None or not len(graph.timing.rank):
        return 0.0
    measured, chosen, halves = read_rows(graph), counted(graph), []
    for rank in ranks:
        program, alike = graph.program_of(rank), measured.alike.get(rank, [rank])
        rows = [row for other in alike for row in measured.rows[other]]
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
