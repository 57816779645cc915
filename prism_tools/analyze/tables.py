"""Tables of ranks and nodes: rows as dictionaries, filtered; analyze/text.py spells them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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

KINDS, SOURCES = ({int(item): item.name.lower() for item in names} for names in (Kind, Source))


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
    parts: dict[tuple[int, bytes], _Parts] = {}
    known: dict[tuple[int, int, bytes], Row] = {}
    rows = []
    for rank in which.ranks:
        named = which.named_slots(rank)
        key = int(matches.classes.of_rank[rank]), int(graph.ranks.values[rank]), named
        if key not in known:
            program = int(graph.ranks.program[rank]), named
            if program not in parts:
                parts[program] = _Parts(graph, rank, which)
            known[key] = _does(graph, matches, times, rank, parts[program])
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


class _Parts:
    """The ``chosen`` nodes of ranks of one program, and by what they do in the ``count`` iterations that times are means of."""

    def __init__(self, graph: Graph, rank: int, which: Filter) -> None:
        program, iterations = graph.program_of(rank), np.array(counted(graph), np.int64)
        self.chosen = timed = which.nodes(rank)
        self.comm = timed[program.kind[timed] == Kind.COMM]
        self.p2p, self.count = int(np.isin(program.op[self.comm], P2P).sum()), 1
        if which.iteration is None and len(iterations):
            timed, self.count = timed[np.isin(program.segment[timed], iterations)], len(iterations)
        kind, works = program.kind[timed], np.isin(program.lane[timed], computing_lanes(graph.lanes, program.lane))
        self.talking = timed[kind == Kind.COMM]
        self.computing = timed[(kind == Kind.COMPUTE) & works]
        self.host = timed[np.isin(kind, (Kind.COMM, Kind.WAIT)) & works]  # others wait beside these


def _does(graph: Graph, matches: Matches, times: Times | None, rank: int, parts: _Parts) -> Row:
    row: Row = {
        "class": int(graph.ranks.program[rank]),
        "nodes": len(parts.chosen),
        "collectives": len(parts.comm) - parts.p2p,
        "send_recv": parts.p2p,
        "bytes": int(graph.values_of(rank).bytes[parts.comm].sum()),
    }
    if times is not None:
        computing, talking, host = (matches.flat(rank, at) for at in (parts.computing, parts.talking, parts.host))
        row["compute_ns"] = int((times.end[computing] - times.start[computing]).sum()) // parts.count
        row["comm_ns"] = int((times.end[talking] - times.held[talking]).sum()) // parts.count
        row["wait_ns"] = int((times.held[host] - times.start[host]).sum()) // parts.count
    return row


def nodes(graph: Graph, **chosen: Any) -> Iterator[Row]:
    """One row a node, by rank and program order; with a timeline its times, with durations how they are known.
    ``chosen``: as for ranks."""
    which, matches = Filter(graph, **chosen), timed_alike(graph)
    times = Times(graph, matches) if graph.timeline is not None else None
    return (row for rank in which.ranks for row in _rows(graph, matches, times, rank, which.nodes(rank)))


def _rows(graph: Graph, matches: Matches, times: Times | None, rank: int, at: np.ndarray) -> Iterator[Row]:
    """The rows of nodes ``at`` of ``rank``."""
    program, group = graph.program_of(rank), _group_ids(graph, rank)[at]
    comm = (program.kind[at] == Kind.COMM) & (group >= 0)
    dtype = np.where(comm, program.dtype[at], -1).tolist()
    peer = np.full(len(at), -1)
    for number in np.unique(group[comm]).tolist():
        here = comm & (group == number)
        peer[here] = _partners(graph, rank, number, program.peer[at[here]], program.root[at[here]])
    columns: dict[str, list] = {
        "node": at.tolist(),
        "iteration": program.segment[at].tolist(),
        "kind": [KINDS[kind] for kind in program.kind[at].tolist()],
        "op": [op_text(op) if op else None for op in program.op[at].tolist()],
        "group": [graph.groups.name[number] if met else None for number, met in zip(group, comm, strict=True)],
        "peer": [number if number >= 0 else None for number in peer.tolist()],
        "bytes": [
            size if met else None for size, met in zip(graph.values_of(rank).bytes[at].tolist(), comm, strict=True)
        ],
        "dtype": [DTYPES[number] if number >= 0 else None for number in dtype],
    }
    if times is not None:
        flats = matches.flat(rank, at)
        start, held, end = times.start[flats], times.held[flats], times.end[flats]
        columns |= {"start_ns": start.tolist(), "wait_ns": (held - start).tolist(), "end_ns": end.tolist()}
    if graph.durations is not None:
        source = graph.durations.source[graph.durations.row[rank]][at].tolist()
        columns["source"] = [SOURCES[number] for number in source]
    columns["callsite"] = [callsite_text(graph, rank, node) or None for node in columns["node"]]
    for values in zip(*columns.values(), strict=True):
        yield {"rank": rank, **dict(zip(columns, values, strict=True))}


def _group_ids(graph: Graph, rank: int) -> np.ndarray:
    """The group id of each node of ``rank``; -1 where it has none."""
    slot = graph.program_of(rank).slot
    slots = np.append(graph.ranks.slots[rank], -1)
    return slots[np.where((slot >= 0) & (slot < len(slots) - 1), slot, len(slots) - 1)]


def _partners(graph: Graph, rank: int, group: int, peer: np.ndarray, root: np.ndarray) -> np.ndarray:
    """Global ranks of the peers or the roots of communication nodes; -1 where one has neither."""
    members = graph.groups.members[group]
    place = np.where(peer >= 0, (graph.group_rank(group, rank) + peer) % len(members), np.maximum(root, 0))
    return np.where((peer >= 0) | (root >= 0), members[place], -1)
