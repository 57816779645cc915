"""Tables of ranks, groups and nodes: rows as dictionaries, filtered; analyze/text.py spells them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from prism_tools.analyze.text import Row
from prism_tools.analyze.waits import held_until, lateness
from prism_tools.graph.equations import flat
from prism_tools.graph.iterations import counted
from prism_tools.graph.match import Matches, find_matches
from prism_tools.graph.model import Graph
from prism_tools.graph.names import callsite_text, op_text, ranks_text
from prism_tools.graph.schema import DTYPES, P2P, Kind, Source


@dataclass(frozen=True)
class Filter:
    """Which nodes to look at; None: all. ``ops``: schema.Op; ``groups``: group ids; ``iterations``: segments."""

    ranks: frozenset[int] | None = None
    ops: frozenset[int] | None = None
    groups: frozenset[int] | None = None
    iterations: frozenset[int] | None = None
    kinds: frozenset[int] | None = None

    def nodes(self, graph: Graph, rank: int) -> np.ndarray:
        """The chosen nodes of ``rank``, in order; PrismError if there is no such rank."""
        program = graph.program_of(rank)
        keep = np.full(len(program), self.ranks is None or rank in self.ranks)
        for chosen, column in ((self.ops, program.op), (self.iterations, program.segment), (self.kinds, program.kind)):
            if chosen is not None:
                keep &= np.isin(column, list(chosen))
        if self.groups is not None:
            keep &= np.isin(_groups(graph, rank), list(self.groups))
        return np.flatnonzero(keep)

    def ranks_of(self, graph: Graph) -> list[int]:
        """The chosen ranks; PrismError for one that does not exist."""
        ranks = range(graph.world_size) if self.ranks is None else sorted(self.ranks)
        for rank in ranks:
            graph.check_rank(rank)
        return list(ranks)


EVERYTHING = Filter()


class _Times:
    """Solved start, end of waiting, and end of each flat node, ns."""

    def __init__(self, graph: Graph, matches: Matches) -> None:
        assert graph.timeline is not None
        self.start = flat(graph.timeline.start, graph.timeline.row)
        self.held = held_until(graph, matches)
        self.end = flat(graph.timeline.end, graph.timeline.row)


def rank_table(graph: Graph, chosen: Filter = EVERYTHING) -> list[Row]:
    """One row a rank: what it does; with a timeline what it computes, transfers and waits, per counted iteration unless
    ``chosen`` names iterations (then their sum); with memory its peak."""
    matches = find_matches(graph, strict=False)
    times = _Times(graph, matches) if graph.timeline is not None else None
    rows = []
    for rank in chosen.ranks_of(graph):
        program, nodes = graph.program_of(rank), chosen.nodes(graph, rank)
        comm = nodes[program.kind[nodes] == Kind.COMM]
        p2p = int(np.isin(program.op[comm], P2P).sum())
        row: Row = {
            "rank": rank,
            "class": int(graph.ranks.program[rank]),
            "nodes": len(nodes),
            "collectives": len(comm) - p2p,
            "send_recv": p2p,
            "bytes": int(graph.values_of(rank).bytes[comm].sum()),
        }
        if times is not None:
            row |= _spent(graph, matches, times, rank, nodes, chosen.iterations is None)
        if graph.memory is not None:
            known = graph.memory.rss[graph.memory.rank == rank]
            row["rss_bytes"] = int(known.max()) if len(known) else None
        rows.append(row)
    return rows


def _spent(graph: Graph, matches: Matches, times: _Times, rank: int, nodes: np.ndarray, average: bool) -> Row:
    program, count = graph.program_of(rank), 1
    if average and len(counted(graph)):
        nodes = nodes[np.isin(program.segment[nodes], np.array(counted(graph)))]
        count = len(counted(graph))
    at, kind = nodes + matches.base[rank], program.kind[nodes]
    computing, talking = at[kind == Kind.COMPUTE], at[kind == Kind.COMM]
    host = at[np.isin(kind, (Kind.COMM, Kind.WAIT)) & (program.lane[nodes] == 0)]  # others wait beside the host
    return {
        "compute_ns": int((times.end - times.start)[computing].sum()) // count,
        "comm_ns": int((times.end - times.held)[talking].sum()) // count,
        "wait_ns": int((times.held - times.start)[host].sum()) // count,
    }


def group_table(graph: Graph, chosen: Filter = EVERYTHING) -> list[Row]:
    """One row a group that has a chosen node: operations and bytes; with a timeline its time and who is last in it."""
    matches = find_matches(graph, strict=False)
    times = _Times(graph, matches) if graph.timeline is not None else None
    wanted = np.zeros(int(matches.base[-1]), bool)
    contributed = np.zeros(len(wanted), np.int64)
    for rank in range(graph.world_size):
        nodes = chosen.nodes(graph, rank)
        wanted[matches.base[rank] + nodes] = True
        contributed[matches.base[rank] + nodes] = graph.values_of(rank).bytes[nodes]
    late = lateness(graph, matches) if times is not None else None
    owner = np.repeat(np.arange(len(matches)), np.diff(matches.members.offset))
    rows = []
    for group, members in enumerate(graph.groups.members):
        mine = wanted[matches.members.data] & (matches.group[owner] == group)
        flats, numbers = matches.members.data[mine], np.unique(owner[mine])
        if not len(numbers):
            continue
        ops = Counter(op_text(int(op)) for op in matches.op[numbers])
        row: Row = {
            "group": graph.groups.name[group],
            "backend": graph.groups.backend[group],
            "size": len(members),
            "operations": len(numbers),
            "mostly": ops.most_common(1)[0][0],
            "bytes": int(contributed[flats].sum()),
        }
        if times is not None and late is not None:
            row["comm_ns"] = int((times.end - times.held)[flats].sum()) // len(members)
            row["wait_ns"] = int((times.held - times.start)[flats].sum()) // len(members)
            last = late.last[np.isin(late.match, numbers) & (late.lag > 0)]
            ranks = Counter((np.searchsorted(matches.base, last, side="right") - 1).tolist())
            row["last_rank"], row["last_times"] = ranks.most_common(1)[0] if ranks else (None, 0)
        rows.append(row | {"members": ranks_text(members)})
    return rows


def node_table(graph: Graph, chosen: Filter = EVERYTHING) -> list[Row]:
    """One row a node, by rank and program order; with a timeline its times, with durations how they are known."""
    matches = find_matches(graph, strict=False)
    times = _Times(graph, matches) if graph.timeline is not None else None
    rows = []
    for rank in chosen.ranks_of(graph):
        program, values, groups = graph.program_of(rank), graph.values_of(rank), _groups(graph, rank)
        for node in chosen.nodes(graph, rank).tolist():
            comm = program.kind[node] == Kind.COMM and groups[node] >= 0
            row: Row = {
                "rank": rank,
                "node": node,
                "iteration": int(program.segment[node]),
                "kind": Kind(int(program.kind[node])).name.lower(),
                "op": op_text(int(program.op[node])) if program.op[node] else None,
                "group": graph.groups.name[groups[node]] if comm else None,
                "peer": _partner(graph, rank, node, int(groups[node])) if comm else None,
                "bytes": int(values.bytes[node]) if comm else None,
                "dtype": DTYPES[program.dtype[node]] if comm and program.dtype[node] >= 0 else None,
            }
            if times is not None:
                at = int(matches.base[rank]) + node
                row["start_ns"] = int(times.start[at])
                row["wait_ns"] = int(times.held[at] - times.start[at])
                row["end_ns"] = int(times.end[at])
            if graph.durations is not None:
                row["source"] = Source(int(graph.durations.source[graph.durations.row[rank]][node])).name.lower()
            rows.append(row | {"callsite": callsite_text(graph, rank, node) or None})
    return rows


def _groups(graph: Graph, rank: int) -> np.ndarray:
    """The group id of each node of ``rank``; -1 where it has none."""
    slot = graph.program_of(rank).slot
    slots = np.append(graph.ranks.slots[rank], -1)
    return slots[np.where((slot >= 0) & (slot < len(slots) - 1), slot, len(slots) - 1)]


def _partner(graph: Graph, rank: int, node: int, group: int) -> int | None:
    """Global rank of the peer or the root of a communication node; None if it has neither."""
    program, members = graph.program_of(rank), graph.groups.members[group]
    if program.peer[node] >= 0:
        return int(members[(graph.group_rank(group, rank) + int(program.peer[node])) % len(members)])
    return int(members[program.root[node]]) if program.root[node] >= 0 else None
