"""Joining sliced graphs of one recording, such as those of an array job, into one."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

import numpy as np

from prism_tools.emulate.sandbox import joined_memory, joined_timing
from prism_tools.errors import PrismError
from prism_tools.graph import provenance
from prism_tools.graph.model import Graph, Probes
from prism_tools.graph.tree import to_tree

STRUCTURE = ("world_size", "groups", "programs", "values", "ranks", "lanes", "strings")
PROBED = ("op", "dtype", "reduce", "size", "bytes")  # what a probe is of


def merge(parts: Sequence[tuple[str, Graph]]) -> tuple[str, Graph]:
    """The graph of all slices of ``parts`` (file, sliced graph), and the file whose place its payload path counts from.

    The same in whatever order the parts come. PrismError: a part that is not sliced, of another program, there twice, or
    whose virtual ranks did not answer as those of the others.
    """
    for file, graph in parts:
        if graph.stage != "sliced" or graph.timing is None or not len(graph.timing.rank):
            raise PrismError(f"{file}: stage {graph.stage}, no slices to merge; give what prism-slice run wrote")
    (first_file, first), *rest = sorted(parts, key=lambda part: _first_run(part[1]))
    bare = to_tree(first)
    shared = len(_recording(first))
    owner = _owners(first_file, first)
    for file, graph in rest:
        check_same(bare, to_tree(graph), first_file, file)
        _check_alike(first, graph, first_file, file)
        mine = _owners(file, graph)
        for run in mine.keys() & owner.keys():
            raise PrismError(f"{file}: holds a run of rank {run[0]} that {owner[run]} holds too; give each part once")
        owner |= mine
        _add(first, graph, shared)
    return first_file, first


def _check_alike(first: Graph, graph: Graph, first_file: str, file: str) -> None:
    """Spans depend on the waits beside them: those of slices that did not wait are not those of slices that did."""
    here, there = provenance.answered(graph), provenance.answered(first)
    if here and there and here != there:
        raise PrismError(
            f"{file}: its virtual ranks answered {here}, those of {first_file} {there}; merge slices of one graph and pass"
        )


def _first_run(graph: Graph) -> tuple[int, bytes]:
    assert graph.timing is not None
    first = int(np.argmin(graph.timing.rank))
    return int(graph.timing.rank[first]), graph.timing.start[first].tobytes()


def _owners(file: str, graph: Graph) -> dict[tuple[int, bytes], str]:
    """What tells each measured row from all others -> the file that holds it."""
    timing = graph.timing
    assert timing is not None
    return {(rank, timing.start[row].tobytes()): file for row, rank in enumerate(timing.rank.tolist())}


def _recording(graph: Graph) -> list[dict[str, str]]:
    """The provenance before the first slice: what all parts have in common."""
    tools = [row["tool"] for row in graph.provenance]
    end = next((k for k, tool in enumerate(tools) if tool.startswith("prism-slice")), len(tools))
    return graph.provenance[:end]


def check_same(one: dict[str, Any], other: dict[str, Any], first_file: str, file: str) -> None:
    """PrismError unless both trees (graph/tree.py) are of one recording."""
    for name in STRUCTURE:
        if not _equal(one[name], other[name]):
            raise PrismError(f"{file}: its {name} are not those of {first_file}; merge slices of one recording")


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[name], other[name]) for name in one)
    return bool(np.array_equal(one, other))


def _add(graph: Graph, part: Graph, shared: int) -> None:
    """Append the measurements of ``part``, whose first ``shared`` rows of provenance ``graph`` has."""
    assert graph.timing is not None and part.timing is not None
    part.timing.slice = part.timing.slice + np.int32(graph.timing.slice.max(initial=-1) + 1)
    graph.timing = joined_timing(graph.timing, part.timing)
    if part.memory is not None:
        graph.memory = joined_memory(graph.memory, part.memory)
    if part.probes is not None:
        graph.probes = part.probes if graph.probes is None else _joined_probes(graph.probes, part.probes)
    for row in part.provenance[shared:]:
        provenance.append(graph, row["tool"], shlex.split(row["argv"]))


def _joined_probes(old: Probes, new: Probes) -> Probes:
    """``old``, and those of ``new`` that are of something else."""
    known = set(zip(*(getattr(old, name).tolist() for name in PROBED), strict=True))
    keys = list(zip(*(getattr(new, name).tolist() for name in PROBED), strict=True))
    fresh = [k for k, key in enumerate(keys) if key not in known]
    columns: dict[str, Any] = {}
    for name in Probes.__dataclass_fields__:
        a, b = getattr(old, name), getattr(new, name)
        columns[name] = a + [b[k] for k in fresh] if isinstance(a, list) else np.concatenate([a, b[fresh]])
    return Probes(**columns)
