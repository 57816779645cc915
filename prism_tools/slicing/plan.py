"""The slices of a job: which ranks run together, so that nodes and the busiest groups stay whole, and which slices are run."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable

import numpy as np

from prism_tools.emulate.sandbox import file_name
from prism_tools.errors import PrismError
from prism_tools.graph.model import Graph
from prism_tools.graph.names import ranks_text
from prism_tools.graph.schema import P2P, Kind

COVERS = ("all", "classes")


def slices(graph: Graph, size: int, cover: str = "all") -> list[list[int]]:
    """Sorted ranks of each slice, at most ``size``, by first rank; the same for equal graphs. PrismError: the job is smaller.

    ``cover`` "all": every rank is in one slice. "classes": only so many of these that every program class is in one.
    Nodes stay whole where ``size`` holds them; elsewhere a slice keeps to one node. Groups that fit stay whole, those with the
    most collectives first: these are the tensor-parallel ones.
    """
    if size > graph.world_size:
        raise PrismError(f"no slice of {size} ranks (file has 0-{graph.world_size - 1})")
    planned = _packed(graph, _units(graph, size), size)
    return planned if cover == "all" else _one_per_class(graph, planned)


def chosen(graph: Graph, options: argparse.Namespace) -> list[tuple[int, list[int]]]:
    """Slice number ``options.index`` of the plan, those that hold ``options.ranks``, or all: (number, ranks).

    PrismError: there is no such slice.
    """
    planned, file = list(enumerate(slices(graph, options.size, options.cover))), file_name(options.file)
    if options.index is not None:
        if options.index >= len(planned):
            raise PrismError(f"{file}: no slice {options.index} (the plan has 0-{len(planned) - 1})")
        return [planned[options.index]]
    if options.ranks is None:
        return planned
    if missing := set(options.ranks).difference(*(ranks for _, ranks in planned)):
        problem = f"no slice of one per class holds ranks {ranks_text(missing)}"
        raise PrismError(f"{file}: {problem}; leave --cover classes out")
    return [(number, ranks) for number, ranks in planned if set(ranks) & set(options.ranks)]


def partial_nodes(graph: Graph, planned: Iterable[list[int]]) -> dict[int, int]:
    """Node -> the most of its ranks that run together, of those nodes of which no slice of ``planned`` holds all.

    Empty where the job has one node alone: that is what recording takes for granted.
    """
    size = Counter(graph.ranks.node.tolist())
    most: Counter[int] = Counter()
    for ranks in planned:
        most |= Counter(graph.ranks.node[ranks].tolist())
    return {node: count for node, count in sorted(most.items()) if count < size[node]} if len(size) > 1 else {}


def partial_nodes_text(graph: Graph, planned: Iterable[list[int]]) -> str:
    """A warning of nodes that no slice holds whole; "" if there is none."""
    partial = partial_nodes(graph, planned)
    if not partial:
        return ""
    whole = max(Counter(graph.ranks.node.tolist()).values())
    shown = f"{max(partial.values())} of {whole} ranks of a node run together on {len(partial)} nodes"
    return f"{shown}: what they cost each other there is not seen; slices of {whole} (-s {whole}) hold whole nodes"


def plan(graph: Graph, options: argparse.Namespace) -> None:
    """Print the slices as TSV: index, ranks, their nodes, groups wholly inside and groups that cross the edge."""
    planned = slices(graph, options.size, options.cover)
    print("index\tranks\tnodes\tgroups inside\tgroups crossing", file=sys.stdout)
    for index, ranks in enumerate(planned):
        together = set(ranks)
        touched = {int(group) for rank in ranks for group in graph.ranks.slots[rank]}
        inside = sum(together.issuperset(graph.groups.members[group].tolist()) for group in touched)
        nodes = ranks_text({int(graph.ranks.node[rank]) for rank in ranks})
        print(f"{index}\t{ranks_text(together)}\t{nodes}\t{inside}\t{len(touched) - inside}")
    if warning := partial_nodes_text(graph, planned):
        options.progress.warn(warning)


def _units(graph: Graph, size: int) -> list[list[int]]:
    """Sorted ranks that stay together, at most ``size`` each, by first rank: nodes, then groups."""
    unit = {rank: [rank] for rank in range(graph.world_size)}
    node = graph.ranks.node
    nodes = [np.flatnonzero(node == number).tolist() for number in np.unique(node).tolist()]
    for ranks in nodes + _groups(graph, size):
        parts = {id(unit[rank]): unit[rank] for rank in ranks}
        together = sorted(rank for part in parts.values() for rank in part)
        if len(together) <= size:
            unit.update(dict.fromkeys(together, together))
    return sorted({id(ranks): ranks for ranks in unit.values()}.values())


def _groups(graph: Graph, size: int) -> list[list[int]]:
    """Members of the groups of 2 to ``size`` ranks: within nodes first, then those with the most collectives."""
    operations: dict[int, np.ndarray] = {}
    found = []
    for group, members in enumerate(graph.groups.members):
        if not 2 <= len(members) <= size:
            continue
        first = int(members[0])
        number = int(graph.ranks.program[first])
        if number not in operations:
            program = graph.programs[number]
            collective = (program.kind == Kind.COMM) & ~np.isin(program.op, list(P2P))
            operations[number] = np.bincount(program.slot[collective], minlength=len(graph.ranks.slots[first]))
        count = int(operations[number][graph.ranks.slots[first] == group].sum())
        across = len(set(graph.ranks.node[members].tolist())) > 1
        found.append((across, -count, len(members), sorted(members.tolist())))
    return [members for *_, members in sorted(found)]


def _packed(graph: Graph, units: list[list[int]], size: int) -> list[list[int]]:
    """Each unit into the first slice that has room, and no part of another node."""
    whole = Counter(graph.ranks.node.tolist())

    def nodes(ranks: list[int]) -> tuple[set[int], bool]:
        count = Counter(graph.ranks.node[ranks].tolist())
        return set(count), all(count[node] == whole[node] for node in count)

    done: list[list[int]] = []
    open_: list[tuple[list[int], set[int], bool]] = []
    for unit in units:
        mine, complete = nodes(unit)
        for ranks, theirs, all_whole in open_:
            if len(ranks) + len(unit) <= size and (complete and all_whole or mine & theirs):
                ranks += unit
                theirs |= mine
                break
        else:
            done.append(list(unit))
            open_.append((done[-1], mine, complete))
        open_ = [place for place in open_ if len(place[0]) < size]
    return sorted(sorted(ranks) for ranks in done)


def _one_per_class(graph: Graph, planned: list[list[int]]) -> list[list[int]]:
    """The slice that holds most program classes not yet in one, the first of equals, until all are."""
    classes = [set(graph.ranks.program[ranks].tolist()) for ranks in planned]
    missing = set().union(*classes)
    taken = []
    while missing:
        best = max(range(len(planned)), key=lambda k: (len(classes[k] & missing), -k))
        missing -= classes[best]
        taken.append(best)
    return [planned[k] for k in sorted(taken)]
