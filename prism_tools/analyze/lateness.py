"""Who comes last to collectives, by how much and how often: once for all groups whose members come at the same times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from prism_tools.graph.alike import Seated, Seating, Seats
from prism_tools.graph.equations import flat
from prism_tools.graph.iterations import counted
from prism_tools.graph.match import Matches
from prism_tools.graph.model import Graph
from prism_tools.graph.names import callsite_text
from prism_tools.graph.schema import Match

COLUMNS = ("match", "seating", "place", "last", "lag")


@dataclass
class Lateness:
    """Collectives of the counted iterations with more than one member, in order. An entry stands for one of each group
    of its ``seating`` (int64, of ``seatings``).

    ``match``; ``place``: group rank of who came last; ``last``: its flat node; ``lag``: ns by which it came after the
    (lower) median arrival. ``seating_of``: int64[groups], -1: a group without entries.
    """

    match: np.ndarray
    seating: np.ndarray
    place: np.ndarray
    last: np.ndarray
    lag: np.ndarray
    seatings: list[Seating]
    seating_of: np.ndarray

    def where(self, keep: np.ndarray) -> Lateness:
        """The entries to ``keep`` (bool, or their numbers)."""
        match, seating, place, last, lag = (getattr(self, name)[keep] for name in COLUMNS)
        return Lateness(match, seating, place, last, lag, self.seatings, self.seating_of)

    def by_seating(self) -> Iterator[tuple[int, Lateness]]:
        """Each seating that has entries, and these."""
        order = np.argsort(self.seating, kind="stable")
        distinct, first = np.unique(self.seating[order], return_index=True)
        for seating, rows in zip(distinct.tolist(), np.split(order, first[1:]), strict=False):
            yield seating, self.where(rows)


def lateness(graph: Graph, matches: Matches) -> Lateness:
    """Who came last to every collective, and by how much; where several did, the first by group rank. The median tells
    one straggler from a ragged field, and two stragglers from none. The graph must have a timeline."""
    assert graph.timeline is not None
    classes = matches.classes
    start = flat(graph.timeline.start, graph.timeline.row[classes.lowest])
    segment = flat([program.segment for program in graph.programs], graph.ranks.program[classes.lowest])
    chosen, seats = np.array(counted(graph), np.int64), Seats(graph, matches)
    counts = np.isin(segment, chosen) if len(chosen) else np.ones(len(segment), bool)
    parts: list[list[np.ndarray]] = [[np.empty(0, np.int64)] * len(COLUMNS)]
    for part in seats.seated(np.flatnonzero(matches.kind == Match.COLLECTIVE)):
        kept = counts[part.nodes[:, 0]]
        if len(part.place) > 1 and kept.any():
            parts.append(_entries(part, kept, start))
    match, seating, place, last, lag = (np.concatenate(column) for column in zip(*parts, strict=True))
    seating_of = np.full(len(graph.groups), -1)
    for k, alike in enumerate(seats.seatings):
        seating_of[alike.groups] = k
    found = Lateness(match, seating, place, last, lag, seats.seatings, seating_of)
    return found.where(np.argsort(match, kind="stable"))


def _entries(part: Seated, kept: np.ndarray, start: np.ndarray) -> list[np.ndarray]:
    """The columns of the entries of those rows that are ``kept``."""
    nodes = part.nodes[kept]
    arrival = start[nodes]
    latest, middle = np.argmax(arrival, axis=1), (nodes.shape[1] - 1) // 2
    last = nodes[np.arange(len(nodes)), latest]
    lag = start[last] - np.partition(arrival, middle, axis=1)[:, middle]
    return [part.rows[kept], np.full(len(nodes), part.number), part.place[latest], last, lag]


@dataclass
class Straggler:
    """The rank that others waited for longest: ``total`` ns in ``times`` of the ``joined`` collectives that it took part
    in, longest at call site ``site``."""

    rank: int
    total: int
    times: int
    joined: int
    site: str


def straggler(graph: Graph, matches: Matches, late: Lateness) -> Straggler | None:
    """None if nobody ever waited. Of ranks that cost the same the one that did so first: in the first group, at first."""
    members, held = matches.classes.members, late.where(late.lag > 0)
    cost, times = np.zeros(graph.world_size, np.int64), np.zeros(graph.world_size, np.int64)
    first = np.full(graph.world_size, np.iinfo(np.int64).max)
    for seating, mine in held.by_seating():
        place, at, back, count = np.unique(mine.place, return_index=True, return_inverse=True, return_counts=True)
        lag = np.zeros(len(place), np.int64)
        np.add.at(lag, back, mine.lag)
        groups = held.seatings[seating].groups[:, None]
        rank = members.rank[members.start[groups] + place]
        np.add.at(cost, rank, np.broadcast_to(lag, rank.shape))
        np.add.at(times, rank, np.broadcast_to(count, rank.shape))
        np.minimum.at(first, rank, groups * len(matches) + mine.match[at])
    if not len(held.match):
        return None
    worst = int(np.argmin(np.where(cost == cost.max(), first, np.iinfo(np.int64).max)))
    sites: Counter[str] = Counter()
    for group in np.unique(graph.ranks.slots[worst]).tolist():
        mine = held.where((held.seating == held.seating_of[group]) & (held.place == graph.group_rank(group, worst)))
        for last, ns in zip(mine.last.tolist(), mine.lag.tolist(), strict=True):
            sites[callsite_text(graph, worst, matches.node_of(last))] += ns
    joined = _joined(graph, matches, late, worst)
    return Straggler(worst, int(cost[worst]), int(times[worst]), joined, sites.most_common(1)[0][0])


def _joined(graph: Graph, matches: Matches, late: Lateness, rank: int) -> int:
    """In how many entries' collectives ``rank`` takes part."""
    match = matches.of_node[matches.flat(rank, np.arange(len(graph.program_of(rank))))].astype(np.int64)
    met = np.flatnonzero(match >= 0)
    seating = late.seating_of[graph.ranks.slots[rank][graph.program_of(rank).slot[met]]]
    width = len(late.seatings) + 1
    return int(np.isin(match[met] * width + seating, late.match * width + late.seating).sum())
