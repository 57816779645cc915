"""Classes of ranks that cannot but behave alike: same program, same durations, and groups and peers of the same classes.

Solving one rank of each class solves the graph exactly, because every maximum over all members of a group is one over
the classes of its members. Hashes propose the classes, and a comparison of what they stand for decides.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prism_tools.graph.members import Members
from prism_tools.graph.model import Graph, Program
from prism_tools.graph.schema import P2P, ROOTED, Kind, Op


@dataclass
class Classes:
    """``of_rank``: int32[W], class of each rank. ``lowest``: int32[C], lowest rank of each class, ascending: it stands
    for the others. ``of_group``: int32[groups]; the n-th collectives of all groups of one class are one match.
    ``members``: of the graph's groups."""

    of_rank: np.ndarray
    lowest: np.ndarray
    of_group: np.ndarray
    members: Members

    def __len__(self) -> int:
        return len(self.lowest)


def everybody(graph: Graph) -> Classes:
    """Each rank is a class of its own."""
    ranks = np.arange(graph.world_size, dtype=np.int32)
    return Classes(ranks, ranks, np.arange(len(graph.groups), dtype=np.int32), Members(graph))


def classes_of(graph: Graph, *rows: np.ndarray) -> Classes:
    """The coarsest classes found for which ranks of one class have equal numbers in each of ``rows`` (int[W]: of
    durations, of times)."""
    uses = _uses(graph, [np.asarray(row, np.int64) for row in rows])
    if uses is None:
        return everybody(graph)
    colour, group_colour, count = _numbered(uses.first)[0], np.zeros(len(graph.groups), np.uint64), 0
    while (now := int(colour.max(initial=-1)) + 1) > count:  # a round never joins what an earlier one told apart
        count = now
        group_colour = uses.group_colours(colour)
        colour = _numbered(uses.rank_colours(colour, group_colour))[0]
    colour, lowest = _numbered(colour)
    number = np.empty(len(lowest), np.int32)
    number[np.argsort(lowest)] = np.arange(len(lowest), dtype=np.int32)
    found = Classes(
        number[colour], np.sort(lowest).astype(np.int32), _numbered(group_colour)[0].astype(np.int32), uses.members
    )
    return found if uses.certifies(found) else everybody(graph)


@dataclass
class _Uses:
    """What programs do with their groups, rank by rank.

    ``key``: int64[W, 2 + rows]: program, values that matter, rows. Uses, one for each rank and slot it communicates in:
    ``rank``, ``slot``, ``group``, ``place`` (of ranks whose place matters, else -1), ``gathers`` (it calls
    collectives). Peers, one for each rank, slot and relative peer: ``peer_of``, ``peer`` (global ranks), ``salt``.
    ``first``: hash of all of a rank that no refinement changes.
    """

    members: Members
    backend: np.ndarray
    key: np.ndarray
    rank: np.ndarray
    slot: np.ndarray
    group: np.ndarray
    place: np.ndarray
    gathers: np.ndarray
    peer_of: np.ndarray
    peer: np.ndarray
    salt: np.ndarray

    @property
    def first(self) -> np.ndarray:
        return _hash(*self.key.T, _sums(self.rank, _hash(self.slot, self.place + 1), len(self.key)))

    def group_colours(self, colour: np.ndarray) -> np.ndarray:
        """uint64[groups]: a hash of the multiset of the members' classes and slots, of the size and of the backend."""
        member = _hash(colour[self.members.rank], self.members.slot + 1)
        return _hash(self.backend, self.members.size, _sums(self.members.group, member, len(self.members.size)))

    def rank_colours(self, colour: np.ndarray, group_colour: np.ndarray) -> np.ndarray:
        """uint64[W]: a hash of each rank's class and of those of its groups and peers."""
        mine = np.flatnonzero(self.gathers)
        groups = _sums(self.rank[mine], _hash(group_colour[self.group[mine]], self.slot[mine]), len(colour))
        return _hash(colour, groups, _sums(self.peer_of, _hash(colour[self.peer], self.salt), len(colour)))

    def certifies(self, found: Classes) -> bool:
        """Whether ``found`` is what the hashes say: compared without any."""
        like = found.lowest[found.of_rank]  # uses of ranks with one program are as many, in the same order
        if not np.array_equal(self.key, self.key[like]):
            return False
        where = _first_of(self.rank, len(like))
        twin = where[like[self.rank]] + np.arange(len(self.rank)) - where[self.rank]
        same = (self.place == self.place[twin]) & (self.slot == self.slot[twin])
        same &= ~self.gathers | (found.of_group[self.group] == found.of_group[self.group[twin]])
        where = _first_of(self.peer_of, len(like))
        twin = where[like[self.peer_of]] + np.arange(len(self.peer)) - where[self.peer_of]
        kin = found.of_rank[self.peer] == found.of_rank[self.peer[twin]]
        return bool(same.all() and kin.all() and self._certifies_groups(found))

    def _certifies_groups(self, found: Classes) -> bool:
        members = self.members
        _, chosen = np.unique(found.of_group, return_index=True)
        like = chosen[found.of_group]
        if np.any(members.size != members.size[like]) or np.any(self.backend != self.backend[like]):
            return False
        code = found.of_rank[members.rank].astype(np.int64) * (members.slot.max(initial=0) + 2) + members.slot + 1
        code = code[np.lexsort((code, members.group))]
        twin = members.start[like][members.group] + np.arange(len(code)) - members.start[members.group]
        return bool(np.array_equal(code, code[twin]))


def _uses(graph: Graph, rows: list[np.ndarray]) -> _Uses | None:
    """None if a rank is no member of a group that it uses."""
    members = Members(graph)
    gloo = np.array([backend == "gloo" for backend in graph.groups.backend], bool)
    parts: list[list[np.ndarray]] = [[] for _ in range(5)]
    far: list[list[np.ndarray]] = [[] for _ in range(3)]
    order = np.argsort(graph.ranks.program, kind="stable")
    bounds = np.searchsorted(graph.ranks.program[order], np.arange(len(graph.programs) + 1))
    for p, program in enumerate(graph.programs):
        ranks = order[bounds[p] : bounds[p + 1]]
        for number, (used, calls, roots, in_tree, relative) in enumerate(_slots(program) if len(ranks) else []):
            where = members.in_slot(ranks, used)
            at = members.place(where, ranks)
            if np.any(at < 0):
                return None
            kept = np.isin(at, roots) | (gloo[where] & in_tree)
            columns = (ranks, ranks * 0 + used, where, np.where(kept, at, -1), np.full(len(ranks), calls))
            for part, column in zip(parts, columns, strict=True):
                part.append(column)
            for k, other in enumerate(relative.tolist()):
                far[0].append(ranks)
                far[1].append(members.rank[members.start[where] + (at + other) % members.size[where]])
                far[2].append(ranks * 0 + number * 2**20 + k)
    backend = np.unique(np.array(graph.groups.backend, str), return_inverse=True)[1]
    key = np.stack([graph.ranks.program.astype(np.int64), _values(graph), *rows], 1)
    rank, slot, group, place, gathers = (_sorted_by(parts[0], part) for part in parts)
    peer_of, peer, salt = (_sorted_by(far[0], part) for part in far)
    return _Uses(members, backend, key, rank, slot, group, place, gathers.astype(bool), peer_of, peer, salt)


def _slots(program: Program) -> list[tuple[int, bool, np.ndarray, bool, np.ndarray]]:
    """For each slot in use: slot, whether it calls collectives, their roots, whether one is a broadcast (a tree on gloo:
    every place differs), relative peers."""
    comm = np.flatnonzero(program.kind == Kind.COMM)
    slots, op = program.slot[comm], program.op[comm]
    pairs, rooted = np.isin(op, P2P), np.isin(op, ROOTED)
    found = []
    for slot in np.unique(slots).tolist():
        here = slots == slot
        peer = np.unique(program.peer[comm][here & pairs])
        roots = np.unique(program.root[comm][here & rooted])
        tree = bool(np.any(here & (op == Op.BROADCAST)))
        found.append((slot, bool(np.any(here & ~pairs)), roots, tree, peer[peer >= 0].astype(np.int64)))
    return found


def _values(graph: Graph) -> np.ndarray:
    """int64[W]: equal where tags and bytes of all sends and receives are: these decide what matches, and how."""
    known: dict[bytes, int] = {}
    pairs = [np.flatnonzero((p.kind == Kind.COMM) & np.isin(p.op, P2P)) for p in graph.programs]
    both = graph.ranks.program.astype(np.int64) * max(len(graph.values), 1) + graph.ranks.values
    distinct, back = np.unique(both, return_inverse=True)
    numbers = []
    for pair in distinct.tolist():
        nodes, values = pairs[pair // len(graph.values)], graph.values[pair % len(graph.values)]
        numbers.append(known.setdefault(values.tag[nodes].tobytes() + values.bytes[nodes].tobytes(), len(known)))
    return np.array(numbers, np.int64)[back]


def _sorted_by(ranks: list[np.ndarray], column: list[np.ndarray]) -> np.ndarray:
    if not ranks:
        return np.empty(0, np.int64)
    return np.concatenate(column)[np.argsort(np.concatenate(ranks), kind="stable")]


def _first_of(ranks: np.ndarray, count: int) -> np.ndarray:
    """Where each rank's uses begin, of uses sorted by rank."""
    return np.searchsorted(ranks, np.arange(count))


def _numbered(key: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A number for each distinct key, and where each is found first."""
    _, first, number = np.unique(key, return_index=True, return_inverse=True)
    return number, first


def _hash(*columns: np.ndarray) -> np.ndarray:
    """uint64: hashes of rows of numbers (each taken in by the finaliser of splitmix64)."""
    x = np.zeros(len(columns[0]), np.uint64)
    for column in columns:
        x = x + column.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    return x


def _sums(owner: np.ndarray, hashes: np.ndarray, count: int) -> np.ndarray:
    """uint64[count]: the sum of the hashes of each owner; ``owner`` ascends. A sum does not see the order."""
    running = np.concatenate([np.zeros(1, np.uint64), np.cumsum(hashes, dtype=np.uint64)])
    ends = np.searchsorted(owner, np.arange(count + 1))
    return running[ends[1:]] - running[ends[:-1]]
