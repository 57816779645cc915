"""Slices as an array of jobs: their commands, and the graph of what they left."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prism_tools.errors import PrismError
from prism_tools.graph import file
from prism_tools.graph.model import Graph
from prism_tools.slicing.plan import chosen

PROBE = "probe"


def question(options: argparse.Namespace, program: Sequence[str]) -> list[Any]:
    """What tells one measurement of a graph from another."""
    places = [options.size, options.cover, options.ranks, options.index, options.nodes]
    return [*places, options.repeat, options.passes, options.no_probe, list(program)]


def commands(
    graph: Graph, options: argparse.Namespace, folder: Path, tool: Sequence[str], program: Sequence[str]
) -> dict[str, list[str]]:
    """Name of the part -> the command line that makes ``folder``/NAME.h5: each slice, and (unless --no-probe) the probes.

    ``tool``: what runs prism-slice; ``program``: the end of the command line. PrismError: the graph has slices already, or
    it has no such ranks or slice.
    """
    if graph.timing is not None and graph.durations is None:
        raise PrismError(f"{options.file}: has slices already; give the graph that they were made of")
    if options.ranks:
        from prism_tools.emulate.sandbox import check_ranks  # takes a second

        check_ranks(graph, options.ranks, options.file)
    shared = [os.path.abspath(options.file), "-s", str(options.size), "--cover", options.cover, *options.places]
    made = {}
    for number, _ in chosen(graph, options):
        name = f"slice-{number}"
        own = ["--index", str(number), "--repeat", str(options.repeat), "--no-probe", "-o", str(folder / f"{name}.h5")]
        made[name] = [*tool, "run", *shared, *own, *program]
    if not options.no_probe:
        made[PROBE] = [*tool, "probe", *shared, "-o", str(folder / f"{PROBE}.h5")]
    return made


def gathered(paths: Sequence[str]) -> tuple[str, Graph]:
    """The graph of these parts, and the file whose place its payload path counts from."""
    from prism_tools.slicing.merge import merge  # takes a second: the jobs are submitted before

    probed = [path for path in paths if Path(path).stem == PROBE]
    origin, graph = merge([(path, file.read(path)) for path in paths if path not in probed])
    for path in probed:
        graph.probes = file.read(path).probes
    return origin, graph
