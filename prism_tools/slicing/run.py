"""prism-slice run: the slices that the options ask for, measured as they say, and the graph that this makes."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from prism_tools.capture import nodes
from prism_tools.emulate.sandbox import check_hash_seed, check_ranks, open_payloads
from prism_tools.errors import PrismError
from prism_tools.graph import provenance
from prism_tools.graph.match import find_matches
from prism_tools.graph.model import Graph
from prism_tools.graph.provenance import AT_ONCE, IN_TIME, answered
from prism_tools.launch.slurm import Place, others
from prism_tools.slicing import parallel
from prism_tools.slicing.kept import Kept
from prism_tools.slicing.measuring import Job, Slices, one_pass
from prism_tools.slicing.noise import warn_of_noise
from prism_tools.slicing.passes import run_passes
from prism_tools.slicing.plan import chosen, partial_nodes_text, slices
from prism_tools.slicing.probe import measure


def prepared(graph: Graph, options: argparse.Namespace) -> Slices:
    """The slices that the options ask for. PrismError: they cannot be run."""
    check_hash_seed(graph)
    check_ranks(graph, options.ranks or [], options.file)
    if graph.timing is not None and graph.durations is None and answered(graph) == IN_TIME and options.passes == 1:
        what = f"virtual ranks answered {IN_TIME} in its slices, and would answer {AT_ONCE} in more of them"
        raise PrismError(f"{options.file}: {what}; slice the calibrated graph, or the bare one")
    todo = chosen(graph, options)
    if _place(options, todo) is None:
        parallel.check_cores(options.parallel, max(len(sandbox) for _, sandbox in todo))
    elif options.parallel > 1:
        what = "slices at once share one machine"
        raise PrismError(
            f"--parallel {options.parallel}: {what}; add --nodes 1, or an array job for each slice", status=2
        )
    if warning := partial_nodes_text(graph, [sandbox for _, sandbox in todo]):
        options.progress.warn(warning)
    return todo


def _place(options: argparse.Namespace, todo: Slices) -> Place | None:
    """Nodes beside this one for the sandbox ranks; None: they run here."""
    return others(options.nodes, max(len(sandbox) for _, sandbox in todo))


def run(graph: Graph, options: argparse.Namespace, todo: Slices, folder: Path | None = None) -> Graph:
    """Measure the slices ``todo``; returns ``graph`` with timing, memory and (unless --no-probe) probes.

    If it is calibrated, virtual peers answer at its times, and what was measured before is left out. With --passes all slices
    are measured again at the times that the slices gave. ``folder``: where finished slices are kept, and found again.
    """
    durations, before = graph.durations, graph.timeline
    base = replace(graph, durations=None, timeline=None, steady=None, replay=None)
    if durations is not None:
        base.timing = None
    payloads = open_payloads(graph, options.file)
    kept = Kept(base, folder, options)
    in_time = durations is not None or options.passes > 1
    about: dict[str, Any] = {
        **provenance.environment(),
        "cover": options.cover,
        "answered": IN_TIME if in_time else AT_ONCE,
    }
    with nodes.ready(options.tool, _place(options, todo)) as places:
        job = Job(base, find_matches(base), payloads, options, durations, places)
        graph = one_pass(job, todo, kept)
        if not options.no_probe:
            whole = slices(base, options.size) if options.cover == "all" else [sandbox for _, sandbox in todo]
            graph.probes = kept.probes() or kept.save_probes(
                measure(base, job.matches, whole, options.progress, places)
            )
        everything = options.index is None and options.ranks is None
        if options.passes > 1 or (before is not None and everything):
            graph, about["passes"] = run_passes(job, todo, kept, graph, before)
    warn_of_noise(graph, todo, options.progress, options.passes > 1 or before is not None)
    graph.stage = "sliced"
    graph.environment = {**graph.environment, "slice": about}
    return graph
