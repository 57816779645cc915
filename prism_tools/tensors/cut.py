"""Which contributions cross into a set of ranks: those that a slice or replay of exactly these ranks needs from outside."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from prism_tools.graph.match import Matches
from prism_tools.graph.model import Graph
from prism_tools.graph.schema import P2P, Op


def crosses(op: Op, rank: int, root: int, members: Iterable[int], cut: Collection[int]) -> bool:
    """Whether one of ``cut`` receives what ``rank``, outside, contributes. All ranks are global; ``members``: the
    operation's, of a send its receiver; ``root``: -1 where there is none."""
    if rank in cut or op in (Op.RECV, Op.BARRIER):
        return False
    if op in (Op.REDUCE, Op.GATHER):
        return root in cut
    if op in (Op.BROADCAST, Op.SCATTER) and rank != root:
        return False
    return any(member in cut for member in members)


def crossing(graph: Graph, matches: Matches, cut: Collection[int]) -> Iterator[tuple[int, int]]:
    """(rank, node) of every contribution that crosses into ``cut``, in the order in which the first of ``cut`` needs it."""
    seen: set[int] = set()
    for inside in sorted(cut):
        found = matches.of_node[int(matches.base[inside]) : int(matches.base[inside + 1])]
        for match in found[found >= 0].tolist():
            if match not in seen:
                seen.add(match)
                yield from _of_match(graph, matches, match, cut)


def _of_match(graph: Graph, matches: Matches, match: int, cut: Collection[int]) -> Iterator[tuple[int, int]]:
    places = [(matches.rank_of(m), matches.node_of(m)) for m in matches.members[match].tolist()]
    members = graph.groups.members[int(matches.group[match])]
    for rank, node in places:
        program = graph.program_of(rank)
        op, root = Op(int(program.op[node])), int(program.root[node])
        receivers = [other for other, _ in places if other != rank] if op in P2P else [other for other, _ in places]
        if crosses(op, rank, int(members[root]) if root >= 0 else -1, receivers, cut):
            yield rank, node
