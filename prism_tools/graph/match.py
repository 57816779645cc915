"""Which nodes of different ranks are one communication: collectives by group and order, sends with receives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from prism_tools.errors import PrismError
from prism_tools.graph.classes import Classes, everybody
from prism_tools.graph.members import Members, concatenated
from prism_tools.graph.model import Graph, Ragged
from prism_tools.graph.names import callsite_text, op_text, ranks_text
from prism_tools.graph.schema import P2P, Kind, Match, Op
from prism_tools.graph.semantics import EAGER_BYTES, ignores_tags, match_kind

SHOWN = 20  # problems spelt out in an error; check lists them all


@dataclass
class Matches:
    """All matches of a graph. A node is named by its flat index: node i of rank r is ``base[r] + i``.

    Where ranks of one class were taken together, only the lowest rank of each class has nodes: those of class c begin
    at ``base[c]``. Otherwise each rank is a class of its own.

    ``of_node``: int32[nodes], match of a node or -1. ``members``: flat indices by group rank; a pair is (sender,
    receiver). ``group``: int32[M]; ``kind``: uint8[M] (schema.Match); ``op``: uint8[M] (of the first member).
    ``problems``: one line each match with missing members or differing operations; such a match holds whoever came.
    """

    base: np.ndarray
    of_node: np.ndarray
    members: Ragged
    group: np.ndarray
    kind: np.ndarray
    op: np.ndarray
    classes: Classes
    problems: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.group)

    def flat(self, rank: Any, node: Any) -> Any:
        """The flat index of ``node`` of ``rank``, or of the rank that stands for it; of numbers or arrays of them."""
        return self.base[self.classes.of_rank[rank]] + node

    def rank_of(self, flat: int) -> int:
        """The rank that flat node belongs to."""
        return int(self.classes.lowest[np.searchsorted(self.base, flat, side="right") - 1])

    def node_of(self, flat: int) -> int:
        """The index of a flat node in its rank's program."""
        return int(flat - self.base[np.searchsorted(self.base, flat, side="right") - 1])


@dataclass
class _Comms:
    """The communication nodes of all ranks, one entry each, by rank and program order."""

    flat: np.ndarray
    rank: np.ndarray
    node: np.ndarray
    op: np.ndarray
    group: np.ndarray
    gathering: np.ndarray  # class of the group
    place: np.ndarray  # own rank in the group, -1: not a member
    size: np.ndarray  # of the group
    peer: np.ndarray  # group rank, -1: none
    tag: np.ndarray
    bytes: np.ndarray

    def take(self, keep: np.ndarray) -> _Comms:
        return _Comms(*(getattr(self, name)[keep] for name in self.__dataclass_fields__))


def find_matches(graph: Graph, strict: bool = True, classes: Classes | None = None) -> Matches:
    """Match every COMM node: the n-th collective of each member of a group, the n-th send of a channel (group, source,
    destination, tag) with its n-th receive. With ``classes`` the nodes of one rank of each, which stands for the others.

    PrismError if a match lacks members or its members' operations differ; ``strict=False`` lists these in ``problems``.
    """
    classes = classes or everybody(graph)
    members = classes.members
    lengths = np.array([len(program) for program in graph.programs], np.int64)[graph.ranks.program[classes.lowest]]
    base = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    comms = _gather(graph, base, classes, members)
    problems = _strangers(graph, comms)
    comms = comms.take((comms.place >= 0) & (~np.isin(comms.op, P2P) | (comms.peer >= 0)))
    pairwise = np.isin(comms.op, P2P)
    flats, counts = [], []
    for part, keys in (_collectives(comms.take(~pairwise)), _pairs(graph, comms.take(pairwise), classes, members)):
        order = np.lexsort(keys[::-1])  # by the first key, then the second, …
        starts = _starts(*(key[order] for key in keys[:-1]))
        flats.append(part.flat[order])
        counts.append(np.diff(np.append(starts, len(order))))
        problems += _problems(graph, part.take(order), starts, counts[-1], classes, members)
    matches = _assemble(graph, base, comms, np.concatenate(flats), np.concatenate(counts), classes)
    matches.problems = problems
    if strict and problems:
        more = f" (and {len(problems) - 1} more problems)" if len(problems) > 1 else ""
        raise PrismError(
            f"{problems[0]}{more}; the recording is incomplete or the program mixes up its operations, "
            "see prism-inspect check",
            detail="\n".join(problems[1:SHOWN]),
        )
    return matches


def _gather(graph: Graph, base: np.ndarray, classes: Classes, members: Members) -> _Comms:
    """The communication nodes of one rank of each class; rank-wise arrays are put together once per program."""
    program = graph.ranks.program[classes.lowest]
    nodes = [np.flatnonzero(p.kind == Kind.COMM) for p in graph.programs]
    sizes = np.array([len(nodes[p]) for p in program], np.int64)
    rank = np.repeat(classes.lowest, sizes).astype(np.int64)

    def column(name: str) -> np.ndarray:
        chosen = [p.columns[name][i].astype(np.int64) for p, i in zip(graph.programs, nodes, strict=True)]
        return concatenated([chosen[p] for p in program])

    node = concatenated([nodes[p] for p in program])

    def value(name: str) -> np.ndarray:
        pairs = list(zip(program, graph.ranks.values[classes.lowest], strict=True))
        chosen = {(p, v): getattr(graph.values[v], name)[nodes[p]] for p, v in set(pairs)}
        return concatenated([chosen[pair] for pair in pairs])

    group = members.in_slot(rank, column("slot"))
    place = members.place(group, rank)
    size = members.size[group]
    peer = column("peer")
    return _Comms(
        flat=np.repeat(base[:-1], sizes) + node,
        rank=rank,
        node=node,
        op=column("op"),
        group=group,
        gathering=classes.of_group[group].astype(np.int64),
        place=place,
        size=size,
        peer=np.where(peer >= 0, (place + peer) % np.maximum(size, 1), -1),
        tag=value("tag"),
        bytes=value("bytes"),
    )


def _collectives(comms: _Comms) -> tuple[_Comms, list[np.ndarray]]:
    """The collectives, and keys: all but the last are equal within a match, the last puts its members by group rank."""
    ordinal = _ordinal(_paired(comms.group, comms.rank))
    return comms, [comms.gathering, ordinal, comms.place]


def _pairs(graph: Graph, comms: _Comms, classes: Classes, members: Members) -> tuple[_Comms, list[np.ndarray]]:
    """As _collectives, for sends and receives: the sender comes first. A channel is known by its source's class, in
    which slot that has the group, how much further on the destination is in it, and the tag."""
    receives = (comms.op == Op.RECV).astype(np.int64)
    source = members.start[comms.group] + np.where(receives, comms.peer, comms.place)
    further = np.where(receives, comms.place - comms.peer, comms.peer - comms.place) % np.maximum(comms.size, 1)
    blind = np.array([ignores_tags(backend) for backend in graph.groups.backend], bool)
    tag = np.where(blind[comms.group], 0, comms.tag) if len(comms.tag) else comms.tag
    tag = np.unique(tag, return_inverse=True)[1]
    sender = classes.of_rank[members.rank[source]].astype(np.int64)
    channel = _paired(_paired(_paired(sender, members.slot[source] + 1), further), tag)
    return comms, [channel, _ordinal(channel * 2 + receives), receives]


def _paired(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """One number for each distinct pair (a[i], b[i]) of numbers >= 0, small enough to be paired again."""
    key = a * (b.max(initial=0) + 1) + b
    return key if key.max(initial=0) < 2**31 else np.unique(key, return_inverse=True)[1]


def _ordinal(key: np.ndarray) -> np.ndarray:
    """How many equal keys stand before each key."""
    order = np.argsort(key, kind="stable")
    starts = _starts(key[order])
    ordinal = np.empty(len(key), np.int64)
    ordinal[order] = np.arange(len(key)) - np.repeat(starts, np.diff(np.append(starts, len(key))))
    return ordinal


def _starts(*keys: np.ndarray) -> np.ndarray:
    """Where runs of equal keys begin."""
    differ = np.zeros(len(keys[0]), bool)
    differ[:1] = True
    for key in keys:
        differ[1:] |= key[1:] != key[:-1]
    return np.flatnonzero(differ)


def _assemble(
    graph: Graph, base: np.ndarray, comms: _Comms, flats: np.ndarray, counts: np.ndarray, classes: Classes
) -> Matches:
    offset = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    of_node = np.full(base[-1], -1, np.int32)
    of_node[flats] = np.repeat(np.arange(len(counts)), counts)
    first = np.searchsorted(comms.flat, flats[offset[:-1]])  # comms are sorted by flat index
    group, op = comms.group[first].astype(np.int32), comms.op[first].astype(np.uint8)
    kind = np.zeros(len(group), np.uint8)
    for backend in set(graph.groups.backend):
        theirs = np.array([name == backend for name in graph.groups.backend], bool)
        for number in np.unique(op):
            kind[theirs[group] & (op == number)] = match_kind(backend, Op(number))
        small = comms.bytes[first] <= EAGER_BYTES.get(backend, -1)
        kind[theirs[group] & (kind == Match.PAIR) & small] = Match.EAGER
    return Matches(base, of_node, Ragged(offset, flats.astype(np.int64)), group, kind, op, classes)


def _strangers(graph: Graph, comms: _Comms) -> list[str]:
    """Nodes that cannot take part in any match."""
    lines = []
    for i in np.flatnonzero(comms.place < 0):
        lines.append(f"{_who(graph, comms, i)}: the rank is no member of this group")
    for i in np.flatnonzero((comms.place >= 0) & np.isin(comms.op, P2P) & (comms.peer < 0)):
        lines.append(f"{_who(graph, comms, i)}: the peer is unknown")
    return lines


def _problems(
    graph: Graph, sorted_comms: _Comms, starts: np.ndarray, counts: np.ndarray, classes: Classes, members: Members
) -> list[str]:
    """What is wrong with the matches that begin at ``starts``."""
    if not len(starts):
        return []
    op = sorted_comms.op
    pairwise = np.isin(op[starts], P2P)
    wanted = np.where(pairwise, 2, _members_of_classes(graph, classes, members)[sorted_comms.group[starts]])
    differ = np.zeros(len(starts), bool)
    owner = np.repeat(np.arange(len(starts)), counts)
    differ[owner[op != op[starts][owner]]] = True
    lines = []
    for m in np.flatnonzero((counts != wanted) | (differ & ~pairwise)):
        rows = np.arange(starts[m], starts[m] + counts[m])
        lines.append(_problem(graph, sorted_comms, rows, bool(pairwise[m]), bool(differ[m]), classes))
    return lines


def _members_of_classes(graph: Graph, classes: Classes, members: Members) -> np.ndarray:
    """int64[groups]: how many members a collective of each group has, those of one class and slot taken together."""
    if len(classes) == graph.world_size:
        return members.size
    code = classes.of_rank[members.rank].astype(np.int64) * len(members.rank) + members.slot + 1
    order = np.lexsort((code, members.group))
    first = _starts(members.group[order], code[order])
    return np.bincount(members.group[order][first], minlength=len(members.size))


def _problem(graph: Graph, comms: _Comms, rows: np.ndarray, pairwise: bool, differ: bool, classes: Classes) -> str:
    first, members = rows[0], graph.groups.members[comms.group[rows[0]]]
    who = _who(graph, comms, first)
    if pairwise:
        peer = members[comms.peer[first]]
        return f"{who}: rank {peer} has no {'send' if comms.op[first] == Op.RECV else 'receive'} for it"
    if differ:
        other = next(row for row in rows if comms.op[row] != comms.op[first])
        return f"{who}: but {_who(graph, comms, other)} is the same operation in order"
    came = set(comms.rank[rows].tolist())
    missing = {rank for rank in members.tolist() if int(classes.lowest[classes.of_rank[rank]]) not in came}
    return f"{who}: no counterpart on ranks {ranks_text(missing)}"


def _who(graph: Graph, comms: _Comms, i: np.integer | int) -> str:
    rank, node = int(comms.rank[i]), int(comms.node[i])
    site = callsite_text(graph, rank, node)
    peer = ""
    if comms.op[i] in P2P and comms.peer[i] >= 0:
        towards = "from" if comms.op[i] == Op.RECV else "to"
        peer = f" {towards} rank {graph.groups.members[comms.group[i]][comms.peer[i]]}"
    return f"rank {rank} {op_text(comms.op[i])}{peer} on {graph.groups.name[comms.group[i]]}, node {node}" + (
        f" ({site})" if site else ""
    )
