"""Who waited for whom in the solved timeline, and what the critical path is made of."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from prism_tools.analyze.lateness import Lateness, lateness
from prism_tools.errors import PrismError
from prism_tools.graph.alike import meetings
from prism_tools.graph.equations import flat
from prism_tools.graph.match import Matches
from prism_tools.graph.model import Graph, Program, Timeline
from prism_tools.graph.names import callsite_text, op_text
from prism_tools.graph.releases import all_releases, apart_of
from prism_tools.graph.schema import P2P, Kind, Match, Source

MOST = 2**22  # durations looked at at once


def timeline_of(graph: Graph) -> Timeline:
    """The solved timeline; PrismError if there is none yet."""
    if graph.timeline is None:
        raise PrismError("the graph has no timeline; run prism-calibrate first")
    return graph.timeline


def held_until(graph: Graph, matches: Matches) -> np.ndarray:
    """int64 per flat node: when it stopped waiting for others, ns.

    COMM: the last arrival that releases it; WAIT: the end of what it waits for; others: their start.
    """
    timeline, lowest = timeline_of(graph), matches.classes.lowest
    start, end = (flat(rows, timeline.row[lowest]) for rows in (timeline.start, timeline.end))
    held, gates = start.copy(), all_releases(matches, apart_of(graph, matches))
    if len(gates):
        latest = np.maximum.reduceat(start[gates.arrivals.data], gates.arrivals.offset[:-1])
        held[gates.leavers.data] = np.repeat(latest, np.diff(gates.leavers.offset))
    waits = [_waits(program) for program in graph.programs]
    for base, program in zip(matches.base.tolist(), graph.ranks.program[lowest].tolist(), strict=False):
        source, target = waits[program]
        np.maximum.at(held, base + target, end[base + source])
    return held


def _waits(program: Program) -> tuple[np.ndarray, np.ndarray]:
    """The communication nodes that waits wait for, and these waits."""
    source, target = program.edges.T
    chosen = (program.kind[target] == Kind.WAIT) & (program.kind[source] == Kind.COMM)
    return source[chosen], target[chosen]


@dataclass
class PathShares:
    """What the critical path's time is spent on, ns.

    ``by_kind``: "compute", an op's name, "send/recv", "wait calls"; ``waiting``: rank that others waited for in
    collectives, taken out of compute; ``by_source``: where the durations come from; ``total``.
    """

    total: int = 0
    by_kind: Counter[str] = field(default_factory=Counter)
    waiting: Counter[int] = field(default_factory=Counter)
    by_source: Counter[Source] = field(default_factory=Counter)


def path_shares(graph: Graph, matches: Matches, late: Lateness | None = None) -> PathShares:
    """The critical path taken apart. Where its last arrival kept a collective waiting, as much of the compute before it
    as the lag explains counts as waiting for that rank."""
    timeline, shares = timeline_of(graph), PathShares()
    path = [(rank, node) for rank, node in timeline.critical.tolist()]
    met = [(match, other) for match, other in meetings(graph, matches, timeline.critical).tolist()]
    late = lateness(graph, matches) if late is None else late
    lag_of = dict(zip(zip(late.match.tolist(), late.seating.tolist(), strict=True), late.lag.tolist(), strict=True))
    clock = int(timeline.start[timeline.row[path[0][0]]][path[0][1]]) if path else 0
    computed, arrived = 0, None  # compute on the path since the last communication; who arrived, if the path jumps
    for k, (rank, node) in enumerate(path):
        match, group = met[k]
        if match >= 0 and met[k] in met[k + 1 : k + 2]:
            arrived = rank
            continue
        end = int(timeline.end[timeline.row[rank]][node])
        span, clock = end - clock, end
        shares.total += span
        name = _name(graph, rank, node)
        shares.by_kind[name] += span
        if graph.durations is not None:
            shares.by_source[Source(int(graph.durations.source[graph.durations.row[rank]][node]))] += span
        if match < 0:
            computed += span if name == "compute" else 0
            continue
        collective = matches.kind[match] == Match.COLLECTIVE
        waited = min(lag_of.get((match, int(late.seating_of[group])), 0), computed) if collective else 0
        shares.by_kind["compute"] -= waited
        shares.waiting[rank if arrived is None else arrived] += waited
        computed, arrived = 0, None
    return shares


def _name(graph: Graph, rank: int, node: int) -> str:
    program = graph.program_of(rank)
    kind, op = int(program.kind[node]), int(program.op[node])
    if kind == Kind.COMM:
        return "send/recv" if op in P2P else op_text(op)
    return "wait calls" if kind == Kind.WAIT else "compute"


@dataclass
class SlowSpan:
    """Compute of one rank on the critical path that takes longer than its peers': between two call sites of ``rank``
    (``after`` one, ``before`` the other), ``excess`` ns more, summed over the ``times`` that it is on the path."""

    rank: int
    after: str
    before: str
    excess: int
    times: int


def slow_span(graph: Graph) -> SlowSpan | None:
    """Where the critical path loses most to one rank: its compute spans beside the same spans of the ranks with the same
    program, of which the (lower) median counts. None where no span is longer than that, or nobody has a peer."""
    if graph.timeline is None or graph.durations is None:
        return None
    found: dict[tuple[int, str, str], SlowSpan] = {}
    own, row = graph.durations.own, graph.durations.row
    path = graph.timeline.critical
    program_of = graph.ranks.program[path[:, 0]]
    for number, program in enumerate(graph.programs):
        mine = path[program_of == number]
        mine = mine[program.kind[mine[:, 1]] == Kind.COMPUTE]
        peers = np.flatnonzero(graph.ranks.program == number)
        if not len(mine):
            continue
        nodes, place = np.unique(mine[:, 1], return_inverse=True)
        usual = _medians(own, *np.unique(row[peers], return_counts=True), nodes)[place.reshape(-1)]
        for (rank, node), peer in zip(mine.tolist(), usual.tolist(), strict=True):
            excess = int(own[row[rank]][node]) - peer
            if excess > 0:
                key = rank, _site_beside(graph, rank, node, -1), _site_beside(graph, rank, node, 1)
                span = found.setdefault(key, SlowSpan(*key, 0, 0))
                span.excess, span.times = span.excess + excess, span.times + 1
    return max(found.values(), key=lambda span: span.excess, default=None)


def _medians(own: list[np.ndarray], rows: np.ndarray, count: np.ndarray, nodes: np.ndarray) -> np.ndarray:
    """int64[nodes]: the lower median of ``own`` over ranks, ``count`` of which have each of ``rows``."""
    middle, found = (count.sum() - 1) // 2, [np.empty(0, np.int64)]
    step = max(MOST // len(rows), 1)
    for first in range(0, len(nodes), step):
        table = np.stack([own[row][nodes[first : first + step]] for row in rows.tolist()])
        if len(rows) == count.sum():
            found.append(np.partition(table, middle, axis=0)[middle])
            continue
        order = np.argsort(table, axis=0)
        at = np.argmax(np.cumsum(count[order], axis=0) > middle, axis=0)
        columns = np.arange(table.shape[1])
        found.append(table[order[at, columns], columns])
    return np.concatenate(found)


def _site_beside(graph: Graph, rank: int, node: int, step: int) -> str:
    """The nearest call site before (``step`` -1) or after (1) a compute span on its lane; "" if there is none."""
    lane, at = graph.program_of(rank).lane, node + step
    while 0 <= at < len(lane):
        if lane[at] == lane[node] and (site := callsite_text(graph, rank, at)):
            return site
        at += step
    return ""
