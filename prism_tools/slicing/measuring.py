"""Running slices: each rank for real, its neighbours beside it, everybody else answered by the assistant, at once or in time."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from prism_tools.capture import ranks
from prism_tools.capture.nodes import Nodes
from prism_tools.emulate.condense import condense
from prism_tools.emulate.planner import AtOnce, Timed
from prism_tools.emulate.replay import issue_costs
from prism_tools.emulate.sandbox import joined_memory, joined_timing, memory, run_sandbox, timing
from prism_tools.graph.iterations import iteration_times
from prism_tools.graph.match import Matches
from prism_tools.graph.model import Durations, Graph
from prism_tools.graph.names import ranks_text
from prism_tools.graph.order import dependency_order
from prism_tools.slicing import parallel
from prism_tools.slicing.kept import Kept, Part
from prism_tools.tensors.payload import PayloadReader

Slices = list[tuple[int, list[int]]]  # number in the plan, ranks


@dataclass
class Job:
    """What running a slice needs. ``durations``: virtual peers answer at the times that these give; None: at once.
    ``places``: nodes on which sandbox ranks run; None: here."""

    graph: Graph
    matches: Matches
    payloads: PayloadReader | None
    options: argparse.Namespace
    durations: Durations | None
    places: Nodes | None = None
    label: str = ""  # of the pass, in progress and names of parts


def one_pass(job: Job, todo: Slices, kept: Kept) -> Graph:
    """``job.graph`` and the measurements of every slice of ``todo``, kept or new, in their order."""
    parts: dict[int, Part] = {}
    for number, sandbox in todo:
        part = kept.part(name_of(job, number), sandbox)
        if part is not None:
            parts[number] = part
    if parts:
        job.options.progress.warn(
            f"{len(parts)} of {len(todo)} slices were measured by an earlier call; -f begins anew"
        )
    unknown = 0
    for number, part in new_parts(job, [place for place in todo if place[0] not in parts], len(todo)):
        kept.save(name_of(job, number), part)
        parts[number] = part
        unknown += part.unknown
    if unknown:
        job.options.progress.warn(f"{unknown} contributions were not recorded: what depends on their values may differ")
    graph = replace(job.graph)
    first = int(graph.timing.slice.max(initial=-1)) + 1 if graph.timing is not None else 0
    for place, (number, _) in enumerate(todo):
        part = parts[number]
        part.timing.slice = np.full_like(part.timing.rank, first + place)
        graph.timing = part.timing if graph.timing is None else joined_timing(graph.timing, part.timing)
        graph.memory = joined_memory(graph.memory, part.memory)
    return graph


def name_of(job: Job, number: int) -> str:
    """What a slice's part is called."""
    return f"{job.label}slice-{number}"


def new_parts(job: Job, todo: Slices, total: int) -> Iterator[tuple[int, Part]]:
    """Measure slices: as many at once as --parallel says, after a first one, which shows how much memory one takes."""
    beside, progress = job.options.parallel, job.options.progress
    alone = todo if beside == 1 else todo[:1]

    def report(done: int, sandbox: list[int]) -> None:
        progress.update(f"{job.label}slice {total - len(todo) + done + 1}/{total}  ranks {ranks_text(set(sandbox))}")

    for done, (number, sandbox) in enumerate(alone):
        report(done, sandbox)
        part = measured(job, sandbox)
        yield number, part
    rest = todo[len(alone) :]
    if rest:
        beside = parallel.fitting(beside, int(part.memory.rss.sum()), progress)
        report(1, rest[0][1])
        work = parallel.in_processes(rest, beside, lambda place: measured(job, place[1]))
        for done, ((number, sandbox), part) in enumerate(work, 2):
            report(done, sandbox)
            yield number, part


def measured(job: Job, sandbox: list[int]) -> Part:
    """Run one slice as often as --repeat says."""
    graph, options = job.graph, job.options
    shown = 2 if options.output == "-" else ranks.OURS  # stdout is for the graph
    output = shown if options.verbose else ranks.SILENT
    condensed = costs = None
    if job.durations is not None:
        order = dependency_order(graph, job.matches)
        condensed = condense(graph, job.matches, order, job.durations, set(sandbox))
        costs = issue_costs(graph)
    rows: list[tuple[int, int, int, dict[str, Any]]] = []
    unknown = 0
    for repeat in range(options.repeat):
        planner = AtOnce(graph, job.matches, set(sandbox)) if condensed is None else Timed(condensed)
        traces, assistant = run_sandbox(
            graph, job.matches, sandbox, planner, job.payloads, job.places, output, issue_cost=costs
        )
        unknown += assistant.values.unknown
        rows += [(rank, 0, repeat, traces[rank]) for rank in sandbox]
    new = timing(rows)
    everything = range(graph.iterations())
    new.iteration_ns = [
        iteration_times(graph.program_of(row[0]), new.start[k], new.end[k], everything) for k, row in enumerate(rows)
    ]
    return Part(new, memory("slice", traces), unknown)
