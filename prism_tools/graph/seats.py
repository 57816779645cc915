"""Who communicates where: each rank's collectives of a group, sends to and receives from one rank, as lists of nodes.

Ranks that share a program share its lists too, so nothing here is of the size of all nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prism_tools.graph.classes import Classes
from prism_tools.graph.members import concatenated
from prism_tools.graph.model import Graph
from prism_tools.graph.schema import P2P, Kind, Op
from prism_tools.graph.semantics import ignores_tags


@dataclass
class Lists:
    """``node``, ``op``, ``bytes``: of communication nodes, one list after the other, each in the order of its program."""

    node: np.ndarray
    op: np.ndarray
    bytes: np.ndarray

    def append(self, chosen: list[np.ndarray], node: list[np.ndarray]) -> None:
        """More lists: of ``chosen`` entries, with other names of the nodes."""
        at = concatenated(chosen)
        self.node = np.concatenate([self.node, *node])
        self.op, self.bytes = np.append(self.op, self.op[at]), np.append(self.bytes, self.bytes[at])


@dataclass
class Seats:
    """One for each laid-out rank and use: a group's collectives, or the sends to, or receives from, one rank by one tag.

    ``owner``: laid-out rank; ``group``; ``place``: its own rank in the group, -1: not a member. ``pair``, ``receives``:
    bool. ``source``: for pairs the sender's index among all members, ``further``: how much further on in the group the
    receiver is, ``tag``: 0 where it does not matter. ``known``: whether it can match anything.
    ``at``, ``count``: its list in ``Lists``; ``base``: what makes the list's nodes flat.
    """

    owner: np.ndarray
    group: np.ndarray
    place: np.ndarray
    pair: np.ndarray
    receives: np.ndarray
    source: np.ndarray
    further: np.ndarray
    tag: np.ndarray
    known: np.ndarray
    at: np.ndarray
    count: np.ndarray
    base: np.ndarray

    def take(self, chosen: np.ndarray) -> Seats:
        return Seats(*(getattr(self, name)[chosen] for name in self.__dataclass_fields__))

    def joined(self, other: Seats) -> Seats:
        """These, then the other ones."""
        both = ((getattr(self, name), getattr(other, name)) for name in self.__dataclass_fields__)
        return Seats(*(np.concatenate(columns) for columns in both))


def seats_of(graph: Graph, classes: Classes, base: np.ndarray) -> tuple[Seats, Lists]:
    """The seats of one rank of each class, whose nodes begin at ``base``."""
    program, values = graph.ranks.program[classes.lowest], graph.ranks.values[classes.lowest]
    blind, number = _blind(graph, classes)
    kinds, kind = np.unique(np.stack([program, values, number]), axis=1, return_inverse=True)
    ranks = np.split(np.argsort(kind.reshape(-1), kind="stable"), np.cumsum(np.bincount(kind.reshape(-1)))[:-1])
    parts: list[list[np.ndarray]] = [[] for _ in Seats.__dataclass_fields__]
    lists: list[list[np.ndarray]] = [[] for _ in Lists.__dataclass_fields__]
    size = 0
    for (p, v, b), owner in zip(kinds.T.tolist(), ranks, strict=True):
        uses, found = _uses(graph, p, v, blind[b])
        for part, column in zip(parts, _seats(classes, owner, base, uses, size), strict=True):
            part.append(column)
        for rows, column in zip(lists, found, strict=True):
            rows.append(column)
        size += len(found[0])
    columns = [concatenated(part) for part in parts]
    boolean = [name in ("pair", "receives", "known") for name in Seats.__dataclass_fields__]
    seats = Seats(*(column.astype(bool) if yes else column for column, yes in zip(columns, boolean, strict=True)))
    return seats, Lists(*(concatenated(rows) for rows in lists))


def _blind(graph: Graph, classes: Classes) -> tuple[list[np.ndarray], np.ndarray]:
    """The distinct answers to "in which slots do tags not matter", and which one each laid-out rank has."""
    blind = np.array([ignores_tags(backend) for backend in graph.groups.backend], bool)
    known: dict[bytes, int] = {}
    number = np.zeros(len(classes), np.int64)
    for k, rank in enumerate(classes.lowest.tolist()):
        number[k] = known.setdefault(blind[graph.ranks.slots[rank]].tobytes(), len(known))
    return [np.frombuffer(row, bool) for row in known], number


def _uses(graph: Graph, p: int, v: int, blind: np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Of one program with one set of values: (slot, pair, receives, peer, tag, at, count) of each use, and its lists."""
    program, values = graph.programs[p], graph.values[v]
    comm = np.flatnonzero(program.kind == Kind.COMM)
    slot, op = program.slot[comm].astype(np.int64), program.op[comm].astype(np.int64)
    pair = np.isin(op, P2P)
    peer = np.where(pair, np.maximum(program.peer[comm], -1), -1).astype(np.int64)
    tags, tag = np.unique(np.where(pair & ~blind[slot], values.tag[comm], 0), return_inverse=True)
    side = np.where(pair, 1 + (op == Op.RECV), 0)
    far = int(peer.max(initial=-1)) + 2
    key = ((slot * 3 + side) * far + peer + 1) * max(len(tags), 1) + tag
    order = np.argsort(
        key.astype(np.uint16) if key.max(initial=0) < 2**16 else key, kind="stable"
    )  # short ones: linear
    at = np.flatnonzero(np.diff(key[order], prepend=-1))
    first = order[at]
    columns = [column[first] for column in (slot, pair, op == Op.RECV, peer, tags[tag])]
    return [*columns, at, np.diff(at, append=len(order))], [comm[order], op[order], values.bytes[comm][order]]


def _seats(
    classes: Classes, owner: np.ndarray, base: np.ndarray, uses: list[np.ndarray], begin: int
) -> list[np.ndarray]:
    """The columns of Seats, of the laid-out ranks ``owner``, which share these uses with lists from ``begin`` on."""
    members, many = classes.members, len(uses[0])
    slot, pair, receives, peer, tag, at, count = (np.tile(column, len(owner)) for column in uses)
    owner = np.repeat(owner, many)
    rank = classes.lowest[owner].astype(np.int64)
    group = members.in_slot(rank, slot)
    place = members.place(group, rank)
    size = np.maximum(members.size[group], 1)
    other = (place + peer) % size
    known = (place >= 0) & (~pair | (peer >= 0))
    sender, receiver = np.where(receives, other, place), np.where(receives, place, other)
    source = np.where(pair & known, members.start[group] + sender, 0)
    return [
        owner, group, place, pair, receives, source, (receiver - sender) % size, tag, known, at + begin, count,
        base[owner],
    ]  # fmt: skip
