"""Probes: each distinct crossing operation run alone, by K processes with the real backend (design §2)."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from prism_tools.calibrate.entries import Entries
from prism_tools.calibrate.probes import Key, keys_of
from prism_tools.capture import nodes, ranks
from prism_tools.capture.nodes import Nodes
from prism_tools.capture.server import Server
from prism_tools.graph.match import Matches, find_matches
from prism_tools.graph.model import Graph, Probes
from prism_tools.graph.schema import UNKNOWN, Kind
from prism_tools.launch.slurm import others
from prism_tools.slicing.plan import slices
from prism_tools.slicing.probe_program import REPEATS, program

MOST_PROCESSES = 16  # larger groups are measured with this many members, which the report calls a fit
MOST_SIZES = 12  # distinct sizes of one operation; value-dependent ones have thousands


def probe(graph: Graph, options: argparse.Namespace) -> Graph:
    """Measure the operations that cross slices of ``options.size`` ranks (all operations without a size)."""
    with nodes.ready(options.tool, others(options.nodes, MOST_PROCESSES)) as places:
        planned = slices(graph, options.size, options.cover) if options.size else []
        graph.probes = measure(graph, find_matches(graph), planned, options.progress, places, options.repeats)
    return graph


def measure(
    graph: Graph,
    matches: Matches,
    planned: list[list[int]],
    progress: Any,
    places: Nodes | None,
    repeats: int = REPEATS,
) -> Probes | None:
    """Probes of the operations that cross the ``planned`` slices, run here or on ``places``; None if nothing crosses."""
    wanted = wanted_operations(graph, matches, planned)
    if not wanted:
        return None
    progress.update(f"probing {len(wanted)} operations alone")
    processes = min(MOST_PROCESSES, max(operation.size for operation in wanted))
    plans = [operation for operation in wanted if operation.size <= processes] + [
        Key(o.op, o.dtype, o.reduce, processes, o.bytes) for o in wanted if o.size > processes
    ]
    traces = run_processes(processes, partial(program, plans, repeats), places)
    rows = [summary(plan, samples) for plan, samples in zip(plans, split(plans, repeats, traces), strict=True)]
    larger = [operation for operation in wanted if operation.size > processes]
    if larger:
        which = ", ".join(f"{size:,}" for size in sorted({operation.size for operation in larger}))
        what = "how long their operations take, and which members leave late, is by analogy (a fit)"
        progress.warn(f"groups of {which} ranks are probed by {processes} processes: {what}")
    columns = list(zip(*rows, strict=True))
    sizes = [plan.size for plan in plans[: len(plans) - len(larger)]] + [o.size for o in larger]
    tails, issue = ([np.resize(row[k], count) for row, count in zip(rows, sizes, strict=True)] for k in (2, 3))
    return Probes(
        np.array([plan.op for plan in plans], np.uint8),
        np.array([plan.dtype for plan in plans], np.int16),
        np.array([plan.reduce for plan in plans], np.uint8),
        np.array(sizes, np.int32),
        np.array([plan.bytes for plan in plans], np.int64),
        np.array(columns[0], np.int64),
        np.array(columns[1], np.int64),
        np.full(len(plans), repeats, np.int32),
        tails,
        issue,
        np.array([plan.size for plan in plans], np.int32),
    )


def wanted_operations(graph: Graph, matches: Matches, planned: list[list[int]]) -> list[Key]:
    """The distinct operations of groups whose members do not all run in one of the ``planned`` slices."""
    slice_of = -1 - np.arange(graph.world_size)  # those in no slice each count for themselves
    for number, ranks_ in enumerate(planned):
        slice_of[ranks_] = number
    crosses = np.array([len(np.unique(slice_of[members])) > 1 for members in graph.groups.members], bool)
    chosen = np.flatnonzero(crosses[matches.group])
    found: dict[tuple[int, int, int, int], list[int]] = {}
    for key in keys_of(graph, matches, Entries(graph, matches), chosen)[0]:
        found.setdefault((key.op, key.dtype, key.reduce, key.size), []).append(key.bytes)
    return [Key(*kind, amount) for kind, amounts in sorted(found.items()) for amount in thinned(sorted(amounts))]


def thinned(amounts: list[int]) -> list[int]:
    """At most MOST_SIZES of the sorted amounts, evenly spread; calibrate takes the nearest."""
    if len(amounts) <= MOST_SIZES:
        return amounts
    return [amounts[round(k * (len(amounts) - 1) / (MOST_SIZES - 1))] for k in range(MOST_SIZES)]


def run_processes(count: int, body: Callable[[], None], places: Nodes | None) -> list[dict[str, Any]]:
    """Run ``body`` in ``count`` forked ranks with the real backend between them: their traces, times on one clock."""
    server = Server(places)
    try:
        for rank in range(count):
            server.spawn(
                ranks.Spec(
                    [], "/", {}, count, rank, rank, 0, count, rank, frozenset(range(count)), -1, False, body=body
                )
            )
        for member in server.ranks.values():
            member.main.send(("go",))
        while server.running():
            server.poll(None)
        clocks = places.clocks() if places is not None else {}
        for member in server.ranks.values():
            if member.trace is not None and member.place in clocks:
                times = member.trace["times"]
                times[times != UNKNOWN] += clocks[member.place].offset
        return [server.ranks[rank].trace or {} for rank in range(count)]
    finally:
        server.close()


def split(plans: list[Key], repeats: int, traces: list[dict[str, Any]]) -> list[np.ndarray]:
    """Per plan int64[2 * repeats, members, 3]: (ready, end, issue cost) of its synchronous and asynchronous calls."""
    streams = []
    for trace in traces:
        nodes = np.flatnonzero(trace["columns"]["kind"] == Kind.COMM)
        streams.append(np.stack([trace["times"][nodes, 1], trace["times"][nodes, 3], trace["issue"][nodes]], 1))
    positions = [0] * len(traces)
    result = []
    for plan in plans:
        samples = np.empty((2 * repeats, plan.size, 3), np.int64)
        for member in range(plan.size):
            at = positions[member]
            samples[:, member] = streams[member][at : at + 2 * repeats]
            positions[member] = at + 2 * repeats
        result.append(samples)
    return result


def summary(plan: Key, samples: np.ndarray) -> tuple[int, int, np.ndarray, np.ndarray]:
    """Duration and spread (half the interquartile range), tails and issue cost int64[members], ns."""
    together, apart = np.split(samples, 2)
    ready, end = together[:, :, 0], together[:, :, 1]
    first = end.min(axis=1)
    durations = first - ready.max(axis=1)
    low, high = np.percentile(durations, (25, 75))
    tails = [usual(row) for row in (end - first[:, None]).T]
    issue = [usual(row) for row in apart[:, :, 2].T]
    return max(usual(durations), 0), int(high - low) // 2, np.array(tails, np.int64), np.array(issue, np.int64)


def usual(sample: np.ndarray) -> int:
    """The mean without what exceeds four medians: a process that lost its core shows in every tool, and in no job's model."""
    kept = sample[sample <= 4 * max(float(np.median(sample)), 1)]
    return int(kept.mean()) if len(kept) else 0
