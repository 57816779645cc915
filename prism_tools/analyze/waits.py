"""Who waited for whom in the solved timeline, and what the critical path is made of."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from prism_tools.errors import PrismError
from prism_tools.graph.equations import flat
from prism_tools.graph.iterations import counted
from prism_tools.graph.match import Matches
from prism_tools.graph.model import Graph, Timeline
from prism_tools.graph.names import callsite_text, op_text
from prism_tools.graph.releases import releases
from prism_tools.graph.schema import P2P, Kind, Match, Source


def timeline_of(graph: Graph) -> Timeline:
    """The solved timeline; PrismError if there is none yet."""
    if graph.timeline is None:
        raise PrismError("the graph has no timeline; run prism-calibrate first")
    return graph.timeline


def held_until(graph: Graph, matches: Matches) -> np.ndarray:
    """int64 per flat node: when it stopped waiting for others, ns.

    COMM: the last arrival that releases it; WAIT: the end of what it waits for; others: their start.
    """
    timeline = timeline_of(graph)
    start, end = flat(timeline.start, timeline.row), flat(timeline.end, timeline.row)
    held = start.copy()
    members, offset = matches.members.data, matches.members.offset
    if len(matches):
        held[members] = np.repeat(np.maximum.reduceat(start[members], offset[:-1]), np.diff(offset))
    for match in np.flatnonzero(~np.isin(matches.kind, (Match.COLLECTIVE, Match.PAIR))).tolist():
        for arrivals, leavers in releases(graph, matches, match):
            held[leavers] = start[arrivals].max()
    for rank in range(graph.world_size):
        program, base = graph.program_of(rank), int(matches.base[rank])
        source, target = program.edges[:, 0], program.edges[:, 1]
        waits = (program.kind[target] == Kind.WAIT) & (program.kind[source] == Kind.COMM)
        np.maximum.at(held, base + target[waits], end[base + source[waits]])
    return held


@dataclass
class Lateness:
    """One entry per collective of the counted iterations with more than one member, in order of matches.

    ``match``; ``last``: flat node that arrived last; ``lag``: ns by which it came after the (lower) median arrival.
    """

    match: np.ndarray
    last: np.ndarray
    lag: np.ndarray


def lateness(graph: Graph, matches: Matches) -> Lateness:
    """Who came last to every collective, and by how much. The median tells one straggler from a ragged field, and two
    stragglers from none."""
    timeline, chosen = timeline_of(graph), counted(graph)
    start = flat(timeline.start, timeline.row)
    segment = np.concatenate([graph.program_of(rank).segment for rank in range(graph.world_size)])
    sizes = np.diff(matches.members.offset)
    first = matches.members.data[matches.members.offset[:-1]]
    wanted = (matches.kind == Match.COLLECTIVE) & (sizes > 1)
    if len(chosen):
        wanted &= np.isin(segment[first], np.array(chosen))
    numbers = np.flatnonzero(wanted)
    last, lag = np.zeros(len(numbers), np.int64), np.zeros(len(numbers), np.int64)
    for k, match in enumerate(numbers.tolist()):
        members = matches.members[match]
        arrivals = start[members]
        latest = int(np.argmax(arrivals))
        last[k] = members[latest]
        lag[k] = arrivals[latest] - np.partition(arrivals, (len(arrivals) - 1) // 2)[(len(arrivals) - 1) // 2]
    return Lateness(numbers, last, lag)


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


def path_shares(graph: Graph, matches: Matches) -> PathShares:
    """The critical path taken apart. Where its last arrival kept a collective waiting, as much of the compute before it
    as the lag explains counts as waiting for that rank."""
    timeline, shares = timeline_of(graph), PathShares()
    path = [(int(rank), int(node)) for rank, node in timeline.critical]
    late = lateness(graph, matches)
    lag_of = dict(zip(late.match.tolist(), late.lag.tolist(), strict=True))
    clock = int(timeline.start[timeline.row[path[0][0]]][path[0][1]]) if path else 0
    computed, arrived = 0, None  # compute on the path since the last communication; who arrived, if the path jumps
    for k, (rank, node) in enumerate(path):
        match = int(matches.of_node[matches.base[rank] + node])
        if match >= 0 and k + 1 < len(path) and match == matches.of_node[matches.base[path[k + 1][0]] + path[k + 1][1]]:
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
        waited = min(lag_of.get(match, 0), computed)
        shares.by_kind["compute"] -= waited
        shares.waiting[rank if arrived is None else arrived] += waited
        computed, arrived = 0, None
    return shares


def _name(graph: Graph, rank: int, node: int) -> str:
    program = graph.program_of(rank)
    kind, op = program.kind[node], program.op[node]
    if kind == Kind.COMM:
        return "send/recv" if op in P2P else op_text(int(op))
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
        usual = np.partition([own[row[peer]][mine[:, 1]] for peer in peers], (len(peers) - 1) // 2, axis=0)
        for (rank, node), peer in zip(mine.tolist(), usual[(len(peers) - 1) // 2].tolist(), strict=True):
            excess = int(own[row[rank]][node]) - peer
            if excess > 0:
                key = rank, _site_beside(graph, rank, node, -1), _site_beside(graph, rank, node, 1)
                span = found.setdefault(key, SlowSpan(*key, 0, 0))
                span.excess, span.times = span.excess + excess, span.times + 1
    return max(found.values(), key=lambda span: span.excess, default=None)


def _site_beside(graph: Graph, rank: int, node: int, step: int) -> str:
    """The nearest call site before (``step`` -1) or after (1) a compute span on its lane; "" if there is none."""
    lane, at = graph.program_of(rank).lane, node + step
    while 0 <= at < len(lane):
        if lane[at] == lane[node] and (site := callsite_text(graph, rank, at)):
            return site
        at += step
    return ""
