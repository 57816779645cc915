"""Who waits for whom in a match: sets of arrivals that must gather, and the members that each set lets go."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prism_tools.graph.match import Matches
from prism_tools.graph.model import Graph, Ragged
from prism_tools.graph.schema import Match

Release = tuple[list[int], list[int]]  # arrivals, leavers (flat nodes): the leavers go once all the arrivals have come


@dataclass
class Releases:
    """The releases of all matches: rows of flat nodes (int64). ``releases[k]`` is the k-th. In the first ``together``
    all the arrivals are the leavers; each of the others has one leaver."""

    arrivals: Ragged
    leavers: Ragged
    together: int

    def __len__(self) -> int:
        return len(self.arrivals)

    def __getitem__(self, k: int) -> Release:
        return self.arrivals[k].tolist(), self.leavers[k].tolist()


@dataclass
class Apart:
    """The releases of matches with a root that not everybody leaves together. Row k of ``coming``: the arrivals of the k-th
    (flat nodes, int64); ``going[k]``: its only leaver."""

    coming: Ragged
    going: np.ndarray


WITH_ROOT = tuple(int(kind) for kind in (Match.ROOT_FIRST, Match.ROOT_LAST, Match.ROOTED, Match.TREE))


def all_releases(matches: Matches, apart: Apart) -> Releases:
    """The releases of all matches: of those that everybody leaves together, of eager pairs, then ``apart``."""
    eager = eager_pairs(matches)
    together = rows_of(matches.members, np.flatnonzero(~eager & ~np.isin(matches.kind, WITH_ROOT)))
    pairs = matches.members.data[matches.members.offset[:-1][eager][:, None] + [0, 0, 1]]  # sender | sender, receiver
    coming = Ragged(_offset(np.tile([1, 2], len(pairs))), pairs.reshape(-1))
    alone = np.concatenate([pairs[:, [0, 2]].reshape(-1), apart.going])
    leavers = joined([together, Ragged(np.arange(len(alone) + 1), alone)])
    return Releases(joined([together, coming, apart.coming]), leavers, len(together))


def eager_pairs(matches: Matches) -> np.ndarray:
    """bool: the matches whose sender, their first member, does not wait for the other."""
    return (matches.kind == Match.EAGER) & (np.diff(matches.members.offset) == 2)


def apart_of(graph: Graph, matches: Matches) -> Apart:
    """The releases of all matches with a root."""
    rooted = np.flatnonzero(np.isin(matches.kind, WITH_ROOT))
    found = [release for match in rooted.tolist() for release in releases(graph, matches, match)]
    leavers = [leaver for _, (leaver,) in found]
    return Apart(Ragged.from_rows([arrivals for arrivals, _ in found], np.int64), np.array(leavers, np.int64))


def rows_of(ragged: Ragged, chosen: np.ndarray) -> Ragged:
    """These rows, in this order."""
    size = np.diff(ragged.offset)[chosen]
    offset = _offset(size)
    at = np.arange(offset[-1]) + np.repeat(ragged.offset[:-1][chosen] - offset[:-1], size)
    return Ragged(offset, ragged.data[at])


def joined(parts: list[Ragged]) -> Ragged:
    """The rows of all parts, one after the other."""
    size = np.concatenate([np.diff(part.offset) for part in parts])
    return Ragged(_offset(size), np.concatenate([part.data for part in parts]))


def reverse(rows: Ragged, count: int) -> Ragged:
    """Row n, of ``count``: the rows that have n, ascending."""
    owner = np.repeat(np.arange(len(rows)), np.diff(rows.offset))
    offset = np.concatenate([[0], np.cumsum(np.bincount(rows.data, minlength=count))]).astype(np.int64)
    return Ragged(offset, owner[np.argsort(rows.data, kind="stable")])


def _offset(size: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(size)]).astype(np.int64)


def releases(graph: Graph, matches: Matches, match: int) -> list[Release]:
    """The releases of ``match`` by its kind (design §2); every member leaves in exactly one."""
    members: list[int] = matches.members[match].tolist()
    kind = int(matches.kind[match])
    if kind == Match.EAGER and len(members) == 2:
        return [(members[:1], members[:1]), (members, members[1:])]
    root = root_of(graph, matches, match)
    if not root:
        return [(members, members)]
    others = [member for member in members if member not in root]
    if kind == Match.ROOT_FIRST:
        return [(root, root)] + [(root + [other], [other]) for other in others]
    if kind == Match.ROOT_LAST:
        return [([other], [other]) for other in others] + [(members, root)]
    if kind == Match.ROOTED:
        return [(root + [other], [other]) for other in others] + [(members, root)]
    return _tree(members, members.index(root[0]))


def _tree(members: list[int], root: int) -> list[Release]:
    """Gloo's broadcast: a binomial tree of rendezvous; a member needs its ancestors, itself and its children."""
    size = len(members)
    turned = [members[(root + place) % size] for place in range(size)]
    found = []
    for place in range(size):
        needed = [place]
        while needed[-1]:
            needed.append(needed[-1] & ~(1 << (needed[-1].bit_length() - 1)))
        step = 1 << place.bit_length()
        while place + step < size:
            needed.append(place + step)
            step <<= 1
        found.append(([turned[k] for k in needed], [turned[place]]))
    return found


def root_of(graph: Graph, matches: Matches, match: int) -> list[int]:
    """The root's flat node in a ``match`` whose kind has one; empty if it has none."""
    if int(matches.kind[match]) not in WITH_ROOT:
        return []
    members = matches.members[match].tolist()
    place = int(graph.program_of(matches.rank_of(members[0])).root[matches.node_of(members[0])])
    rank = int(graph.groups.members[int(matches.group[match])][place])
    rank = int(matches.classes.lowest[matches.classes.of_rank[rank]])
    return [member for member in members if matches.rank_of(member) == rank]
