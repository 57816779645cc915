"""Matches of one rank of each class, for reports and checks, and which of the graph's own matches they stand for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from prism_tools.graph.classes import classes_of
from prism_tools.graph.equations import flat
from prism_tools.graph.match import Matches, find_matches
from prism_tools.graph.model import Graph
from prism_tools.graph.schema import P2P, Op

MOST = 2**22  # members listed at once


def matches_alike(graph: Graph, *rows: np.ndarray) -> Matches:
    """Matches of one rank of each class of ranks that have equal numbers in each of ``rows`` (int[W]). Where some are
    incomplete, so that each is a problem of its own, those of all ranks."""
    matches = find_matches(graph, strict=False, classes=classes_of(graph, *rows))
    return find_matches(graph, strict=False) if matches.problems else matches


def timed_alike(graph: Graph) -> Matches:
    """As matches_alike, of ranks whose times and durations are equal, as far as there are any."""
    return matches_alike(graph, *(part.row for part in (graph.timeline, graph.durations) if part is not None))


def meetings(graph: Graph, matches: Matches, path: np.ndarray) -> np.ndarray:
    """int64[n, 2]: which of the graph's own matches each node of ``path``, int64[n, 2] of (rank, node), is in: one of
    ``matches``, and the group, of a pair the sending rank; (-1, -1): in none."""
    rank, node = path.T
    members, found = matches.classes.members, np.full(path.shape, -1, np.int64)
    found[:, 0] = matches.of_node[matches.flat(rank, node)]
    for number, program in enumerate(graph.programs):
        mine = np.flatnonzero((graph.ranks.program[rank] == number) & (found[:, 0] >= 0))
        ranks, nodes = rank[mine], node[mine]
        group, op = members.in_slot(ranks, program.slot[nodes]), program.op[nodes]
        sender = (members.place(group, ranks) + program.peer[nodes] * (op == Op.RECV)) % np.maximum(
            members.size[group], 1
        )
        found[mine, 1] = np.where(np.isin(op, P2P), members.rank[members.start[group] + sender], group)
    return found


@dataclass
class Seating:
    """``groups``: int64, ascending; their members, by group rank, have the same ``seats``: int64[size]."""

    groups: np.ndarray
    seats: np.ndarray


@dataclass
class Seated:
    """Matches ``rows`` (int64[n]) in the groups of seating ``number``: flat ``nodes`` (int64[n, k]) of the k members that
    came, who are at ``place`` (int64[k])."""

    rows: np.ndarray
    number: int
    place: np.ndarray
    nodes: np.ndarray


class Seats:
    """A seat is a class of ranks and the slot in which these have a group: class * ``width`` + slot + 1, less than ``count``.
    ``of_entry``:
    int64, seat of each entry of ``classes.members``; ``of_member``: of each entry of ``matches.members.data``, no two of
    one match alike. ``seatings``: those that ``seated`` found so far."""

    def __init__(self, graph: Graph, matches: Matches) -> None:
        self._matches, classes = matches, matches.classes
        members, nodes = classes.members, matches.members.data
        self.width = int(members.slot.max(initial=-1)) + 2
        self.count = self.width * len(classes)
        self.of_entry = classes.of_rank[members.rank].astype(np.int64) * self.width + members.slot + 1
        rank = classes.lowest[np.searchsorted(matches.base, nodes, side="right") - 1]
        slot = flat([program.slot for program in graph.programs], graph.ranks.program[classes.lowest])[nodes]
        group = members.in_slot(rank, slot)
        self.of_member = self.of_entry[members.start[group] + members.place(group, rank)]
        self._by_class = np.argsort(classes.of_group, kind="stable")
        self._first = np.searchsorted(classes.of_group[self._by_class], np.arange(len(graph.groups) + 1))
        self.seatings: list[Seating] = []
        self._of_class: dict[int, range] = {}

    def seated(self, picked: np.ndarray) -> Iterator[Seated]:
        """The members of the ``picked`` matches, which are collectives, once for each seating of their groups."""
        offset, data = self._matches.members.offset, self._matches.members.data
        for number, rows in self._batches(picked):
            if number not in self._of_class:
                fresh = self._seatings(number)
                self._of_class[number] = range(len(self.seatings), len(self.seatings) + len(fresh))
                self.seatings += fresh
            at = offset[rows][:, None] + np.arange(offset[rows[0] + 1] - offset[rows[0]])
            for same, came in equal_rows(self.of_member[at]):
                for seating in self._of_class[number]:
                    column, place = _places(came, self.seatings[seating].seats)
                    for some in np.split(same, np.arange(0, len(same), max(MOST // len(place), 1))[1:]):
                        yield Seated(rows[some], seating, place, data[at[some]][:, column])

    def _batches(self, picked: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Class of groups, and its matches, in order, of which equally many members came."""
        number, size = (
            self._matches.classes.of_group[self._matches.group[picked]],
            np.diff(self._matches.members.offset),
        )
        key = number.astype(np.int64) * (int(size.max(initial=0)) + 1) + size[picked]
        order = np.argsort(key, kind="stable")
        ends = np.flatnonzero(np.diff(key[order])) + 1
        for batch in np.split(order, ends) if len(picked) else []:
            yield int(number[batch[0]]), picked[batch]

    def _seatings(self, number: int) -> list[Seating]:
        """Of the groups of class ``number``."""
        groups, members = self._by_class[self._first[number] : self._first[number + 1]], self._matches.classes.members
        seats = self.of_entry[members.start[groups][:, None] + np.arange(members.size[groups[0]])]
        return [Seating(groups[same], row) for same, row in equal_rows(seats)]


def equal_rows(table: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Of each distinct row of ``table``: the numbers of those that are equal to it, ascending, and the row."""
    if np.all(table == table[0]):
        return [(np.arange(len(table)), table[0])]
    distinct, back = np.unique(table, axis=0, return_inverse=True)
    return [(np.flatnonzero(back.reshape(-1) == k), row) for k, row in enumerate(distinct)]


def _places(came: np.ndarray, seats: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of each of ``seats`` that came, by place: which of ``came`` it is, and the place."""
    order = np.argsort(came)
    at = order[np.minimum(np.searchsorted(came[order], seats), len(came) - 1)]
    place = np.flatnonzero(came[at] == seats)
    return at[place], place
