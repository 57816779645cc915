"""Matches of one rank of each class, for reports and checks, and which of the graph's own matches they stand for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prism_tools.graph.classes import classes_of
from prism_tools.graph.equations import flat
from prism_tools.graph.match import Matches, find_matches
from prism_tools.graph.model import Graph
from prism_tools.graph.schema import P2P, Op


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


class Seats:
    """A seat is a class of ranks and the slot in which these have a group: class * ``width`` + slot + 1. ``of_entry``:
    int64, seat of each entry of ``classes.members``; ``of_member``: of each entry of ``matches.members.data``, no two of
    one match alike."""

    def __init__(self, graph: Graph, matches: Matches) -> None:
        classes, self._members = matches.classes, matches.classes.members
        members, nodes = self._members, matches.members.data
        self.width = int(members.slot.max(initial=-1)) + 2
        self.of_entry = classes.of_rank[members.rank].astype(np.int64) * self.width + members.slot + 1
        rank = classes.lowest[np.searchsorted(matches.base, nodes, side="right") - 1]
        slot = flat([program.slot for program in graph.programs], graph.ranks.program[classes.lowest])[nodes]
        group = members.in_slot(rank, slot)
        self.of_member = self.of_entry[members.start[group] + members.place(group, rank)]
        self._by_class = np.argsort(classes.of_group, kind="stable")
        self._first = np.searchsorted(classes.of_group[self._by_class], np.arange(len(graph.groups) + 1))

    def seatings(self, number: int) -> list[Seating]:
        """Of the groups of class ``number``."""
        groups = self._by_class[self._first[number] : self._first[number + 1]]
        size = self._members.size[groups[0]]
        seats = self.of_entry[self._members.start[groups][:, None] + np.arange(size)]
        if np.all(seats == seats[0]):
            return [Seating(groups, seats[0])]
        distinct, back = np.unique(seats, axis=0, return_inverse=True)
        return [Seating(groups[back.reshape(-1) == k], row) for k, row in enumerate(distinct)]
