"""Every invariant of a graph, one named function each: ``graph -> list of problems``, empty where it holds."""

from __future__ import annotations

from typing import Any

import numpy as np

from prism_tools.errors import PrismError
from prism_tools.graph.check_matches import (
    SHOWN,
    acyclic,
    checked_matches,
    matches_complete,
    matches_consistent,
    timeline_respects_matches,
)
from prism_tools.graph.model import Graph, Timing
from prism_tools.graph.names import node_text, ranks_text
from prism_tools.graph.order import predecessors
from prism_tools.graph.schema import EPILOGUE, HOST_LANE, PROLOGUE, UNKNOWN, Kind
from prism_tools.graph.structure import STRUCTURE, timings

OF_MATCHES = (matches_complete, matches_consistent, acyclic, timeline_respects_matches)  # take these too


def check(graph: Graph) -> list[str]:
    """All problems, "invariant: problem". If the tables do not fit each other, only that is reported."""
    lines = _run(STRUCTURE, graph)
    if lines:
        return lines
    matches = checked_matches(graph)
    return [line for function in CHECKS if function not in STRUCTURE
            for line in _run([function], graph, *[matches] * (function in OF_MATCHES))]  # fmt: skip


def _run(functions: list, *arguments: Any) -> list[str]:
    lines = []
    for function in functions:
        found = function(*arguments)
        lines += [f"{function.__name__}: {line}" for line in found[:SHOWN]]
        if len(found) > SHOWN:
            lines.append(f"{function.__name__}: {len(found) - SHOWN} more")
    return lines


def segments_monotone(graph: Graph) -> list[str]:
    """Segments run prologue, 0, 1, …, epilogue, without a step back or a gap."""
    lines = []
    for p, program in enumerate(graph.programs):
        segment = program.segment.astype(np.int64)
        count = int(segment.max(initial=PROLOGUE)) + 1
        place = np.where(segment == EPILOGUE, count, segment)
        back = np.flatnonzero(place[1:] < place[:-1])
        if len(back):
            lines.append(f"program {p}: node {back[0] + 1} steps back to segment {segment[back[0] + 1]}")
        missing = np.setdiff1d(np.arange(count), segment)
        if len(missing):
            lines.append(f"program {p}: no node is in iteration {missing[0]}")
    return lines


def iterations_equal(graph: Graph) -> list[str]:
    """All ranks ran the same number of iterations."""
    counts = np.array([int(program.segment.max(initial=-1)) + 1 for program in graph.programs])[graph.ranks.program]
    parts = [f"ranks {ranks_text(np.flatnonzero(counts == n))} ran {n}" for n in np.unique(counts)]
    return ["; ".join(parts)] if len(parts) > 1 else []


def times_monotone(graph: Graph) -> list[str]:
    """Measured times: end >= start >= 0 (or unknown), and the host's nodes follow each other."""
    lines = []
    for name, timing in timings(graph):
        lines += [line for k in range(len(timing.rank)) for line in _row_times(graph, name, timing, k)]
    return lines


def refuse_backwards(graph: Graph, name: str = "") -> None:
    """PrismError if a clock went backwards in what was measured; ``name``: of the file, if several were given."""
    if backwards := times_monotone(graph):
        file = f"{name}: " if name else ""
        raise PrismError(f"{file}{backwards[0]}; a clock went backwards, run prism-slice again")


def durations_sane(graph: Graph) -> list[str]:
    """Durations, tails and their half-widths are not negative."""
    if graph.durations is None:
        return []
    lines = []
    for name in ("own", "tail", "spread", "bias"):
        for k, row in enumerate(getattr(graph.durations, name)):
            bad = np.flatnonzero(row < 0)
            if len(bad):
                lines.append(f"row {k}: {name} of node {bad[0]} is negative")
    return lines


def timeline_respects_edges(graph: Graph) -> list[str]:
    """Solved times: nodes start after their lane's predecessor and edges' sources ended; waits end after these."""
    timeline = graph.timeline
    if timeline is None:
        return []
    lines, known = [], {}
    for rank, key in enumerate(zip(graph.ranks.program.tolist(), timeline.row.tolist(), strict=True)):
        if key not in known:
            known[key] = _early(graph, rank, timeline.start[key[1]], timeline.end[key[1]])
        bad, pairs = known[key]
        lines += [f"{node_text(graph, rank, node)} ends before it starts, or starts before 0" for node in bad]
        lines += [f"{node_text(graph, rank, b)} starts before {node_text(graph, rank, a)} ended" for a, b in pairs]
    return lines


def _early(graph: Graph, rank: int, start: np.ndarray, end: np.ndarray) -> tuple[list[int], list[list[int]]]:
    """The first node that ends before its start, and the first pair of nodes that overlap though they may not."""
    program = graph.program_of(rank)
    bad = np.flatnonzero((end < start) | (start < 0))
    source, target = program.edges.T
    late = np.where(program.kind[target] == Kind.WAIT, end[target], start[target]) < end[source]
    before, after = (column[: -len(source) or None] for column in predecessors(program, graph.lanes))
    order = np.argsort(program.lane[after], kind="stable")
    queues = np.stack([before, after], 1)[order[start[after[order]] < end[before[order]]]]
    return bad[:1].tolist(), np.concatenate([program.edges[late], queues])[:1].tolist()


def _row_times(graph: Graph, name: str, timing: Timing, k: int) -> list[str]:
    rank, start, end = int(timing.rank[k]), timing.start[k], timing.end[k]
    known = (start != UNKNOWN) & (end != UNKNOWN)
    bad = np.flatnonzero(known & ((start < 0) | (end < start)))
    if len(bad):
        return [f"{name} row {k}: {node_text(graph, rank, int(bad[0]))} ends before it starts, or starts before 0"]
    host = np.flatnonzero((graph.program_of(rank).lane == HOST_LANE) & known)
    back = np.flatnonzero((start[host][1:] < start[host][:-1]) | (end[host][1:] < end[host][:-1]))
    if len(back):
        node = int(host[back[0] + 1])
        return [f"{name} row {k}: {node_text(graph, rank, node)} is earlier than the host's node before it"]
    return []


CHECKS = [
    *STRUCTURE,
    matches_complete,
    matches_consistent,
    acyclic,
    segments_monotone,
    iterations_equal,
    times_monotone,
    durations_sane,
    timeline_respects_edges,
    timeline_respects_matches,
]
