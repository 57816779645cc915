"""Finished slices, kept beside the output until the whole graph is there: what a killed run has measured is not lost."""

from __future__ import annotations

import argparse
import functools
import os
from dataclasses import dataclass, replace
from pathlib import Path

from prism_tools.errors import PrismError
from prism_tools.graph import file, provenance
from prism_tools.graph.check import refuse_backwards
from prism_tools.graph.fields import Tree
from prism_tools.graph.model import Graph, Memory, Probes, Timing
from prism_tools.graph.tree import to_tree
from prism_tools.slicing.merge import check_same

PROBE = "probe"


@dataclass
class Part:
    """One slice's measurements. ``unknown``: contributions that were not recorded (0 in parts that are found)."""

    timing: Timing
    memory: Memory
    unknown: int = 0


class Kept:
    """The parts in ``folder``, sliced graphs as ``run --index`` writes them; without one nothing is kept or found.

    The folder belongs to one question (launch/jobs.py): a part is of this plan if it has the ranks and runs asked for, and
    of this graph if its structure is the same.
    """

    def __init__(self, graph: Graph, folder: Path | None, options: argparse.Namespace) -> None:
        self._graph, self._folder, self._options = graph, folder, options

    def part(self, name: str, ranks: list[int]) -> Part | None:
        """What an earlier call measured of ``ranks``; None if there is none, or it is damaged or of something else."""
        graph = self._read(name)
        if graph is None or graph.timing is None or graph.memory is None:
            return None
        runs = [(rank, repeat) for repeat in range(self._options.repeat) for rank in ranks]
        if list(zip(graph.timing.rank.tolist(), graph.timing.repeat.tolist(), strict=True)) != runs:
            return None
        rows = [
            k for k, rank in enumerate(graph.memory.rank.tolist()) if graph.memory.stage[k] == "slice" and rank in ranks
        ]
        columns = {key: getattr(graph.memory, key)[rows] for key in ("rank", "rss", "allocated", "reserved")}
        return Part(graph.timing, Memory(**columns, stage=["slice"] * len(rows)))

    def save(self, name: str, part: Part) -> None:
        """Keep a slice."""
        self._write(name, replace(self._graph, stage="sliced", timing=part.timing, memory=part.memory, probes=None))

    def probes(self) -> Probes | None:
        """The probes of an earlier call."""
        graph = self._read(PROBE)
        return None if graph is None else graph.probes

    def save_probes(self, probes: Probes | None) -> Probes | None:
        """Keep ``probes`` and return them."""
        if probes is not None:
            self._write(PROBE, replace(self._graph, timing=None, memory=None, probes=probes))
        return probes

    @functools.cached_property
    def _tree(self) -> Tree:
        return to_tree(self._graph)

    def _path(self, name: str) -> Path | None:
        return None if self._folder is None else self._folder / f"{name}.h5"

    def _read(self, name: str) -> Graph | None:
        path = self._path(name)
        if path is None or not path.exists():
            return None
        try:
            graph = file.read(path)
            check_same(self._tree, to_tree(graph), self._options.file, str(path))
            refuse_backwards(graph, str(path))  # a further pass failed at it, and would again
        except PrismError as error:
            self._options.progress.warn(f"{error}: measured again")
            return None
        return graph

    def _write(self, name: str, graph: Graph) -> None:
        path = self._path(name)
        if path is None:
            return
        payload = graph.payload
        if payload.path:  # relative to the graph
            there = os.path.abspath(os.path.join(os.path.dirname(self._options.file), payload.path))
            payload = replace(payload, path=os.path.relpath(there, path.parent))
        graph = replace(graph, payload=payload, provenance=list(graph.provenance))
        provenance.append(graph, self._options.tool, self._options.argv)
        file.write(graph, path)
