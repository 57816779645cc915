"""Running slices: each rank for real once, its neighbours beside it, everybody else answered at once by the assistant."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from prism_tools.capture import nodes, ranks
from prism_tools.emulate.planner import AtOnce
from prism_tools.emulate.sandbox import (
    check_hash_seed,
    check_ranks,
    joined_memory,
    memory,
    open_payloads,
    run_sandbox,
    timing,
)
from prism_tools.graph import provenance
from prism_tools.graph.iterations import iteration_times
from prism_tools.graph.match import find_matches
from prism_tools.graph.model import Graph, Timing
from prism_tools.graph.names import ranks_text
from prism_tools.launch.slurm import others
from prism_tools.slicing.plan import chosen
from prism_tools.slicing.probe import measure

Row = tuple[int, int, int, dict[str, Any]]  # rank, slice, repeat, trace


def run(graph: Graph, options: argparse.Namespace) -> Graph:
    """Measure the slices of ``options.size`` ranks; returns ``graph`` with timing, memory and (unless --no-probe) probes."""
    check_hash_seed(graph)
    check_ranks(graph, options.ranks or [], options.file)
    matches = find_matches(graph)
    payloads = open_payloads(graph, options.file)
    todo = chosen(graph, options)
    first = int(graph.timing.slice.max(initial=-1)) + 1 if graph.timing is not None else 0
    rows: list[Row] = []
    unknown = 0
    shown = 2 if options.output == "-" else ranks.OURS  # stdout is for the graph
    output = shown if options.verbose else ranks.SILENT
    most = max(map(len, todo), default=1)
    with nodes.ready(options.tool, others(options.nodes, most)) as places:
        for number, sandbox in enumerate(todo):
            for repeat in range(options.repeat):
                options.progress.update(f"slice {number + 1}/{len(todo)}  ranks {ranks_text(set(sandbox))}")
                planner = AtOnce(graph, matches, set(sandbox))
                traces, assistant = run_sandbox(graph, matches, sandbox, planner, payloads, places, output)
                unknown += assistant.values.unknown
                rows += [(rank, first + number, repeat, traces[rank]) for rank in sandbox]
        if not options.no_probe:
            graph.probes = measure(graph, matches, options.size, options.progress, places)
    add_rows(graph, rows)
    graph.memory = joined_memory(graph.memory, memory("slice", {row[0]: row[3] for row in rows}))
    if unknown:
        options.progress.warn(f"{unknown} contributions were not recorded: what depends on their values may differ")
    graph.stage = "sliced"
    graph.environment = {**graph.environment, "slice": provenance.environment()}
    return graph


def add_rows(graph: Graph, rows: list[Row]) -> None:
    """Append measured rows to the graph's timing, with the time of each of their iterations."""
    new = timing(rows)
    everything = range(graph.iterations())
    new.iteration_ns = [
        iteration_times(graph.program_of(row[0]), new.start[k], new.end[k], everything) for k, row in enumerate(rows)
    ]
    old = graph.timing
    graph.timing = new if old is None else joined(old, new)


def joined(old: Timing, new: Timing) -> Timing:
    """Rows of both."""
    columns: dict[str, Any] = {}
    for name in Timing.__dataclass_fields__:
        a, b = getattr(old, name), getattr(new, name)
        columns[name] = a + b if isinstance(a, list) else np.concatenate([a, b])
    return Timing(**columns)
