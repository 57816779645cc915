"""Tables of ranks and nodes: rows as dictionaries, filtered; analyze/text.py spells them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from prism_tools.analyze.text import Row, cut
from prism_tools.analyze.waits import held_until, timeline_of
from prism_tools.errors import PrismError
from prism_tools.graph.alike import timed_alike
from prism_tools.graph.equations import flat
from prism_tools.graph.iterations import counted
from prism_tools.graph.match import Matches
from prism_tools.graph.model import Graph
from prism_tools.graph.names import callsite_text, op_text
from prism_tools.graph.schema import DTYPES, P2P, UNKNOWN, Kind, Op, Source
from prism_tools.graph.semantics import computing_lanes


class Filter:
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
        self.named = np.array([group in (None, name) for name in graph.groups.name], bool)
        if group is not None and not self.named.any():
            raise PrismError(f"no group {group} (file has {cut(', '.join(graph.groups.name), 60)})")
        self.group, self.iteration = group, iteration
        self._same = {"op": op and Op[op.upper()], "kind": kind and Kind[kind.upper()], "segment": iteration}
        self._graph = graph

    def named_slots(self, rank: int) -> bytes:
        """Equal for ranks of which the same slots are chosen."""
        return self.named[self._graph.ranks.slots[rank]].tobytes() if self.group is not None else b""

    def nodes(self, rank: int) -> np.ndarray:
        """The chosen nodes of ``rank``, in order."""
        program = self._graph.program_of(rank)
        keep = np.ones(len(program), bool)
        for column, value in self._same.items():
            if value is not None:
                keep &= program.columns[column] == value
        if self.group is not None:
            keep &= np.append(self.named, False)[_group_ids(self._graph, rank)]
        return np.flatnonzero(keep)


class Times:
    """Solved start, end of waiting, and end of each flat node, ns."""

    def __init__(self, graph: Graph, matches: Matches) -> None:
        timeline, lowest = timeline_of(graph), matches.classes.lowest
        self.start = flat(timeline.start, timeline.row[lowest])
        self.held = held_until(graph, matches)
        self.end = flat(timeline.end, timeline.row[lowest])


def ranks(graph: Graph, **chosen: Any) -> list[Row]:
    """One row a rank: what it does; with a timeline what it computes, transfers and waits, in the chosen iteration or
    per counted iteration; with memory its peak. ``chosen``: ranks, op, group, iteration, kind."""
    which, matches = Filter(graph, **chosen), timed_alike(graph)
    times = Times(graph, matches) if graph.timeline is not None else None
    memory = graph.memory and {
        "rss": _most(graph, graph.memory.rank, graph.memory.rss),
        "cuda": _most(graph, graph.memory.rank, graph.memory.allocated),
    }
    known: dict[tuple[int, int, bytes], Row] = {}
    rows = []
    for rank in which.ranks:
        key = int(matches.classes.of_rank[rank]), int(graph.ranks.values[rank]), which.named_slots(rank)
        if key not in known:
            known[key] = _does(graph, matches, times, rank, which)
        row: Row = {"rank": rank, **known[key]}
        for name, most in (memory or {}).items():
            if most[rank] >= 0 or name == "rss":
                row[f"{name}_bytes"] = int(most[rank]) if most[rank] >= 0 else None
        rows.append(row)
    return rows


def _most(graph: Graph, rank: np.ndarray, used: np.ndarray) -> np.ndarray:
    """The largest of ``used`` of each rank, -1: none is known."""
    most = np.full(graph.world_size, UNKNOWN)
    np.maximum.at(most, rank, used)
    return most


def _does(graph: Graph, matches: Matches, times: Times | None, rank: int, which: Filter) -> Row:
    program, nodes = graph.program_of(rank), which.nodes(rank)
    comm = nodes[program.kind[nodes] == Kind.COMM]
    p2p = int(np.isin(program.op[comm], P2P).sum())
    row: Row = {
        "class": int(graph.ranks.program[rank]),
        "nodes": len(nodes),
        "collectives": len(comm) - p2p,
        "send_recv": p2p,
        "bytes": int(graph.values_of(rank).bytes[comm].sum()),
    }
    return row | (_spent(graph, matches, times, rank, nodes, which.iteration is None) if times is not None else {})


def _spent(graph: Graph, matches: Matches, times: Times, rank: int, nodes: np.ndarray, average: bool) -> Row:
    program, count = graph.program_of(rank), 1
    if average and len(counted(graph)):
        nodes = nodes[np.isin(program.segment[nodes], np.array(counted(graph)))]
        count = len(counted(graph))
    at, kind = matches.flat(rank, nodes), program.kind[nodes]
    talking = at[kind == Kind.COMM]
    works = np.isin(program.lane[nodes], computing_lanes(graph.lanes, program.lane))
    computing = at[(kind == Kind.COMPUTE) & works]
    host = at[np.isin(kind, (Kind.COMM, Kind.WAIT)) & works]  # others wait beside these
    return {
        "compute_ns": int((times.end - times.start)[computing].sum()) // count,
        "comm_ns": int((times.end - times.held)[talking].sum()) // count,
        "wait_ns": int((times.held - times.start)[host].sum()) // count,
    }


def nodes(graph: Graph, **chosen: Any) -> list[Row]:
    """One row a node, by rank and program order; with a timeline its times, with durations how they are known.
    ``chosen``: as for ranks."""
    which, matches = Filter(graph, **chosen), timed_alike(graph)
    times = Times(graph, matches) if graph.timeline is not None else None
    rows = []
    for rank in which.ranks:
        program, values, group_of = graph.program_of(rank), graph.values_of(rank), _group_ids(graph, rank)
        base = int(matches.flat(rank, 0))
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
                at = base + node
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
