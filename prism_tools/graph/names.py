"""How ranks, operations and call sites are spelt in messages."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from prism_tools.graph.model import Graph, Program
from prism_tools.graph.schema import Kind, Op


def ranks_text(ranks: Iterable[int]) -> str:
    """Ranks the way Slurm writes them: "0-3,8"; the empty set is "none"."""
    parts: list[str] = []
    ordered = sorted({int(rank) for rank in ranks})
    first = 0
    for k, rank in enumerate(ordered):
        if k + 1 == len(ordered) or ordered[k + 1] != rank + 1:
            parts.append(str(rank) if first == k else f"{ordered[first]}-{rank}")
            first = k + 1
    return ",".join(parts) or "none"


def op_text(op: int) -> str:
    """An operation's name as the program calls it: "all_reduce"."""
    try:
        return Op(op).name.lower()
    except ValueError:
        return f"operation {op}"


def callsite_text(graph: Graph, rank: int, node: int) -> str:
    """The user's line of ``node`` of ``rank``: "train.py:41 step", or "" where it is not known."""
    callsite = int(graph.program_of(rank).callsite[node])
    return graph.strings[callsite] if 0 <= callsite < len(graph.strings) else ""


def sites_of(program: Program) -> np.ndarray:
    """Each node's call site, int64, -1 unknown; a compute span has that of the call it leads to: of the next that has one."""
    sites = program.callsite.astype(np.int64)
    known = np.flatnonzero(sites >= 0)
    following = np.append(known, -1)[np.searchsorted(known, np.arange(len(sites)))]
    spans = (program.kind == Kind.COMPUTE) & (following >= 0)
    sites[spans] = sites[following[spans]]
    return sites


def node_text(graph: Graph, rank: int, node: int) -> str:
    """One node in words: "rank 2 all_reduce on dp0 (train.py:41 step)"."""
    program = graph.program_of(rank)
    kind, op, slot = int(program.kind[node]), int(program.op[node]), int(program.slot[node])
    what = op_text(op) if kind in (Kind.COMM, Kind.MARK) else Kind(kind).name.lower()
    slots = graph.ranks.slots[rank]
    where = f" on {graph.groups.name[slots[slot]]}" if kind == Kind.COMM and 0 <= slot < len(slots) else ""
    site = callsite_text(graph, rank, node)
    return f"rank {rank} {what}{where}" + (f" ({site})" if site else f" (node {node})")
