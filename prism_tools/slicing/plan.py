"""The slices of a job: every rank once, neighbours together so that nodes and tensor-parallel groups stay whole."""

from __future__ import annotations

import argparse
import sys

from prism_tools.errors import PrismError
from prism_tools.graph.model import Graph
from prism_tools.graph.names import ranks_text


def slices(graph: Graph, size: int) -> list[list[int]]:
    """Consecutive runs of ``size`` ranks (the last may be shorter). PrismError if the job is smaller than ``size``."""
    if size > graph.world_size:
        raise PrismError(f"no slice of {size} ranks (file has 0-{graph.world_size - 1})")
    return [list(range(k, min(k + size, graph.world_size))) for k in range(0, graph.world_size, size)]


def chosen(graph: Graph, options: argparse.Namespace) -> list[list[int]]:
    """The slice number ``options.index``, or those that hold ``options.ranks``, or all. PrismError: no such slice."""
    planned = slices(graph, options.size)
    if options.index is None:
        return [ranks for ranks in planned if options.ranks is None or set(ranks) & set(options.ranks)]
    if options.index >= len(planned):
        raise PrismError(f"no slice {options.index} (the plan has 0-{len(planned) - 1})")
    return [planned[options.index]]


def plan(graph: Graph, options: argparse.Namespace) -> None:
    """Print the slices as TSV: index, ranks, their nodes, groups wholly inside and groups that cross the edge."""
    print("index\tranks\tnodes\tgroups inside\tgroups crossing", file=sys.stdout)
    for index, ranks in enumerate(slices(graph, options.size)):
        chosen = set(ranks)
        touched = {int(group) for rank in ranks for group in graph.ranks.slots[rank]}
        inside = sum(chosen.issuperset(graph.groups.members[group].tolist()) for group in touched)
        nodes = ranks_text({int(graph.ranks.node[rank]) for rank in ranks})
        print(f"{index}\t{ranks_text(chosen)}\t{nodes}\t{inside}\t{len(touched) - inside}")
