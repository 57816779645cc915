"""Tables of ranks, groups and nodes: rows as dictionaries, filtered; analyze/text.py spells them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np

from prism_tools.analyze.text import Row, cut
from prism_tools.analyze.waits import held_until, lateness
from prism_tools.errors import PrismError
from prism_tools.graph.equations import flat
from prism_tools.graph.iterations import counted
from prism_tools.graph.match import Matches, find_matches
from prism_tools.graph.model import Graph
from prism_tools.graph.names import callsite_text, op_text, ranks_text
from prism_tools.graph.schema import DTYPES, P2P, Kind, Op, Source
from prism_tools.graph.semantics import computing_lanes


class _Filter:
    """Which nodes a table looks at; None: all. Names as in the tables; PrismError for what does not exist."""

    def __init__(
        self,
        graph: Graph,
        ranks: Iterable[int] | None = None,
        op: str | None = None,
        group: str | None = None,
        iteration: int | None = None,
        kind: str | None = None,
    ) -> None:
        self.ranks = list(range(graph.world_size)) if ranks is None else sorted(set(ranks))
        for rank in self.ranks:
            graph.check_rank(rank)
        self.group = None if group is None else [k for k, name in enumerate(graph.groups.name) if name == group]
        if self.group == []:
            raise PrismError(f"no group {group} (file has {cut(', '.join(graph.groups.name), 60)})")
        self.iteration = iteration
        self._same = {"op": op and Op[op.upper()], "kind": kind and Kind[kind.upper()], "segment": iteration}
        self._graph = graph

    def nodes(self, rank: int) -> np.ndarray:
        """The chosen nodes of ``rank``, in order."""
        program = self._graph.program_of(rank)
        keep = np.full(len(program), rank in self.ranks)
        for column, value in self._same.items():
            if value is not None:
                keep &= program.columns[column] == value
        if self.group is not None:
            keep &= np.isin(_group_ids(self._graph, rank), self.group)
        return np.flatnonzero(keep)


class _Times:
    """Solved start, end of waiting, and end of each flat node, ns."""

    def __init__(self, graph: Graph, matches: Matches) -> None:
        assert graph.timeline is not None
        self.start = flat(graph.timeline.start, graph.timeline.row)
        self.held = held_until(graph, matches)
        self.end = flat(graph.timeline.end, graph.timeline.row)


def ranks(graph: Graph, **chosen: Any) -> list[Row]:
    """One row a rank: what it does; with a timeline what it computes, transfers and waits, in the chosen iteration or
    per counted iteration; with memory its peak. ``chosen``: ranks, op, group, iteration, kind."""
    which = _Filter(graph, **chosen)
    matches = find_matches(graph, strict=False)
    times = _Times(graph, matches) if graph.timeline is not None else None
    rows = []
    for rank in which.ranks:
        program, nodes = graph.program_of(rank), which.nodes(rank)
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
            row |= _spent(graph, matches, times, rank, nodes, which.iteration is None)
        if graph.memory is not None:
            for name, column in (("rss", graph.memory.rss), ("cuda", graph.memory.allocated)):
                known = column[(graph.memory.rank == rank) & (column >= 0)]
                if len(known) or name == "rss":
                    row[f"{name}_bytes"] = int(known.max()) if len(known) else None
        rows.append(row)
    return rows


def _spent(graph: Graph, matches: Matches, times: _Times, rank: int, nodes: np.ndarray, average: bool) -> Row:
    program, count = graph.program_of(rank), 1
    if average and len(counted(graph)):
        nodes = nodes[np.isin(program.segment[nodes], np.array(counted(graph)))]
        count = len(counted(graph))
    at, kind = nodes + matches.base[rank], program.kind[nodes]
    talking = at[kind == Kind.COMM]
    works = np.isin(program.lane[nodes], computing_lanes(graph.lanes, program.lane))
    computing = at[(kind == Kind.COMPUTE) & works]
    host = at[np.isin(kind, (Kind.COMM, Kind.WAIT)) & works]  # others wait beside these
    return {
        "compute_ns": int((times.end - times.start)[computing].sum()) // count,
        "comm_ns": int((times.end - times.held)[talking].sum()) // count,
        "wait_ns": int((times.held - times.start)[host].sum()) // count,
    }


def groups(graph: Graph, **chosen: Any) -> list[Row]:
    """One row a group that has a chosen node: operations and bytes; with a timeline its time per member, and who is
    last in it how often in the counted iterations. ``chosen``: as for ranks."""
    which = _Filter(graph, **chosen)
    matches = find_matches(graph, strict=False)
    times = _Times(graph, matches) if graph.timeline is not None else None
    wanted = np.zeros(int(matches.base[-1]), bool)
    contributed = np.zeros(len(wanted), np.int64)
    for rank in range(graph.world_size):
        nodes = which.nodes(rank)
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


def nodes(graph: Graph, **chosen: Any) -> list[Row]:
    """One row a node, by rank and program order; with a timeline its times, with durations how they are known.
    ``chosen``: as for ranks."""
    which = _Filter(graph, **chosen)
    matches = find_matches(graph, strict=False)
    times = _Times(graph, matches) if graph.timeline is not None else None
    rows = []
    for rank in which.ranks:
        program, values, group_of = graph.program_of(rank), graph.values_of(rank), _group_ids(graph, rank)
        for node in which.nodes(rank).tolist():
            comm = program.kind[node] == Kind.COMM and group_of[node] >= 0
            row: Row = {
                "rank": rank,
                "node": node,
                "iteration": int(program.segment[node]),
                "kind": Kind(int(program.kind[node])).name.lower(),
                "op": op_text(int(program.op[node])) if program.op[node] else None,
                "group": graph.groups.name[group_of[node]] if comm else None,
                "peer": _partner(graph, rank, node, int(group_of[node])) if comm else None,
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


def _group_ids(graph: Graph, rank: int) -> np.ndarray:
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
