"""The members of all matches as flat arrays, whether each rank stands for itself or one for a class of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from prism_tools.graph.members import concatenated
from prism_tools.graph.model import Graph
from prism_tools.graph.releases import WITH_ROOT
from prism_tools.graph.schema import P2P, Op

if TYPE_CHECKING:
    from prism_tools.graph.match import Matches


class Entries:
    """One entry for each member of each match, in the order of ``matches.members``.

    ``flat``: flat node; ``match``; ``rank``: the rank whose node it is (of its class the lowest); ``node``: of its
    program; ``place``: from the root on, where there is one, else its group rank; of a pair 0 (sender) or 1 (receiver).
    ``first[m]``: where match m's entries begin; ``size[m]``: how many ranks take part in it, all of a class counted.
    """

    def __init__(self, graph: Graph, matches: Matches) -> None:
        members = matches.members
        self.flat, self.first = members.data, members.offset[:-1]
        count = np.diff(members.offset)
        self.match = np.repeat(np.arange(len(matches)), count)
        owner = np.searchsorted(matches.base, self.flat, side="right") - 1
        self.rank, self.node = matches.classes.lowest[owner].astype(np.int64), self.flat - matches.base[owner]
        pair = np.isin(matches.op, P2P)
        sizes = matches.classes.members.size
        self.size = np.where(pair, 2, sizes[matches.group])
        group = matches.classes.members.in_slot(self.rank, self.column(graph, "slot"))
        place = matches.classes.members.place(group, self.rank)
        root = np.where(np.isin(matches.kind, WITH_ROOT), self.column(graph, "root")[self.first], 0)
        place = (place - np.maximum(root, 0)[self.match]) % sizes[group]
        self.place = np.where(pair[self.match], np.arange(len(self.flat)) - self.first[self.match], place)

    def of(self, graph: Graph, rows: list[np.ndarray]) -> np.ndarray:
        """int64: what the entries' nodes have in ``rows``, one for each program."""
        start = np.cumsum([0, *map(len, rows)])
        return concatenated(rows)[start[graph.ranks.program[self.rank]] + self.node]

    def column(self, graph: Graph, name: str) -> np.ndarray:
        """int64: a column of the entries' nodes."""
        return self.of(graph, [program.columns[name] for program in graph.programs])

    def bytes(self, graph: Graph, matches: Matches) -> np.ndarray:
        """int64 of each match: for all_to_all the mean over ranks of what they contribute, else the largest contribution (a
        receiver's is 0, and a non-root's may be)."""
        start = np.cumsum([0, *(len(values.bytes) for values in graph.values)])
        given = concatenated([values.bytes for values in graph.values])[
            start[graph.ranks.values[self.rank]] + self.node
        ]
        if not len(given):
            return np.empty(0, np.int64)
        found = np.maximum.reduceat(given, self.first)
        classes, slot = matches.classes, self.column(graph, "slot")
        uneven = found != np.minimum.reduceat(given, self.first)
        for match in np.flatnonzero(uneven & (matches.op == Op.ALL_TO_ALL)).tolist():
            mine = slice(int(self.first[match]), int(matches.members.offset[match + 1]))
            amounts = given[mine]
            if len(amounts) < self.size[match]:
                first = classes.members.start[matches.group[match]]
                all_ = slice(first, first + self.size[match])
                here, slots = classes.of_rank[classes.members.rank[all_]], classes.members.slot[all_]
                owners = classes.of_rank[self.rank[mine]]
                alike = (here == owners[:, None]) & (slots == slot[mine][:, None])
                amounts = np.repeat(amounts, alike.sum(axis=1))
            found[match] = round(int(amounts.sum()) / len(amounts))
        return found
