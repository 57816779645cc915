"""Which nodes of different ranks are one communication: collectives by group and order, sends with receives."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from prism_tools.errors import PrismError
from prism_tools.graph.model import Graph, Ragged
from prism_tools.graph.names import callsite_text, op_text, ranks_text
from prism_tools.graph.schema import P2P, Kind, Match, Op
from prism_tools.graph.semantics import EAGER_BYTES, ignores_tags, match_kind

SHOWN = 20  # problems spelt out in an error; check lists them all


@dataclass
class Matches:
    """All matches of a graph. A node is named by its flat index: node i of rank r is ``base[r] + i``.

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
    problems: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.group)

    def rank_of(self, flat: int) -> int:
        """The rank that flat node belongs to."""
        return int(np.searchsorted(self.base, flat, side="right")) - 1

    def node_of(self, flat: int) -> int:
        """The index of a flat node in its rank's program."""
        return int(flat - self.base[self.rank_of(flat)])


@dataclass
class _Comms:
    """The communication nodes of all ranks, one entry each, by rank and program order."""

    flat: np.ndarray
    rank: np.ndarray
    node: np.ndarray
    op: np.ndarray
    group: np.ndarray
    place: np.ndarray  # own rank in the group, -1: not a member
    size: np.ndarray  # of the group
    peer: np.ndarray  # group rank, -1: none
    tag: np.ndarray
    bytes: np.ndarray

    def take(self, keep: np.ndarray) -> _Comms:
        return _Comms(*(getattr(self, name)[keep] for name in self.__dataclass_fields__))


def find_matches(graph: Graph, strict: bool = True) -> Matches:
    """Match every COMM node: the n-th collective of each member of a group, the n-th send of a channel (group, source,
    destination, tag) with its n-th receive.

    PrismError if a match lacks members or its members' operations differ; ``strict=False`` lists these in ``problems``.
    """
    lengths = np.array([len(program) for program in graph.programs], np.int64)[graph.ranks.program]
    base = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    comms = _gather(graph, base)
    problems = _strangers(graph, comms)
    comms = comms.take((comms.place >= 0) & (~np.isin(comms.op, P2P) | (comms.peer >= 0)))
    pairwise = np.isin(comms.op, P2P)
    flats, counts = [], []
    for part, keys in (_collectives(comms.take(~pairwise)), _pairs(graph, comms.take(pairwise))):
        order = np.lexsort(keys[::-1])  # by the first key, then the second, …
        starts = _starts(*(key[order] for key in keys[:-1]))
        flats.append(part.flat[order])
        counts.append(np.diff(np.append(starts, len(order))))
        problems += _problems(graph, part.take(order), starts, counts[-1])
    matches = _assemble(graph, base, comms, np.concatenate(flats), np.concatenate(counts))
    matches.problems = problems
    if strict and problems:
        more = f" (and {len(problems) - 1} more problems)" if len(problems) > 1 else ""
        raise PrismError(
            f"{problems[0]}{more}; the recording is incomplete or the program mixes up its operations, "
            "see prism-inspect check",
            detail="\n".join(problems[1:SHOWN]),
        )
    return matches


def _gather(graph: Graph, base: np.ndarray) -> _Comms:
    """The communication nodes of all ranks; rank-wise arrays are put together once per program."""
    program = graph.ranks.program
    nodes = [np.flatnonzero(p.kind == Kind.COMM) for p in graph.programs]
    sizes = np.array([len(nodes[p]) for p in program], np.int64)
    rank = np.repeat(np.arange(graph.world_size), sizes)

    def column(name: str) -> np.ndarray:
        chosen = [p.columns[name][i].astype(np.int64) for p, i in zip(graph.programs, nodes, strict=True)]
        return _concatenate([chosen[p] for p in program])

    node = _concatenate([nodes[p] for p in program])

    def value(name: str) -> np.ndarray:
        pairs = list(zip(program, graph.ranks.values, strict=True))
        chosen = {(p, v): getattr(graph.values[v], name)[nodes[p]] for p, v in set(pairs)}
        return _concatenate([chosen[pair] for pair in pairs])

    slot_base = np.concatenate([[0], np.cumsum([len(slots) for slots in graph.ranks.slots])])
    slot_group = _concatenate(graph.ranks.slots)
    group = slot_group[np.repeat(slot_base[:-1], sizes) + column("slot")]
    members = np.array([len(m) for m in graph.groups.members], np.int64)
    place = _places(graph, group, rank)
    size = members[group]
    peer = column("peer")
    return _Comms(
        flat=np.repeat(base[:-1], sizes) + node,
        rank=rank,
        node=node,
        op=column("op"),
        group=group,
        place=place,
        size=size,
        peer=np.where(peer >= 0, (place + peer) % np.maximum(size, 1), -1),
        tag=value("tag"),
        bytes=value("bytes"),
    )


def _places(graph: Graph, group: np.ndarray, rank: np.ndarray) -> np.ndarray:
    """Group rank of each (group, global rank); -1 where the rank is no member."""
    width = graph.world_size
    sizes = [len(m) for m in graph.groups.members]
    owner = np.repeat(np.arange(len(sizes)), sizes)
    keys = owner * width + _concatenate(graph.groups.members)
    place = np.arange(len(keys)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    order = np.argsort(keys, kind="stable")
    wanted = group * width + rank
    at = np.minimum(np.searchsorted(keys[order], wanted), max(len(keys) - 1, 0))
    return np.where(keys[order][at] == wanted, place[order][at], -1) if len(keys) else np.full(len(wanted), -1)


def _collectives(comms: _Comms) -> tuple[_Comms, list[np.ndarray]]:
    """The collectives, and keys: all but the last are equal within a match, the last puts its members by group rank."""
    ordinal = _ordinal(_paired(comms.group, comms.rank))
    return comms, [comms.group, ordinal, comms.place]


def _pairs(graph: Graph, comms: _Comms) -> tuple[_Comms, list[np.ndarray]]:
    """As _collectives, for sends and receives: the sender comes first."""
    receives = (comms.op == Op.RECV).astype(np.int64)
    source = np.where(receives, comms.peer, comms.place)
    target = np.where(receives, comms.place, comms.peer)
    blind = np.array([ignores_tags(backend) for backend in graph.groups.backend], bool)
    tag = np.where(blind[comms.group], 0, comms.tag) if len(comms.tag) else comms.tag
    tag = np.unique(tag, return_inverse=True)[1]
    channel = _paired(_paired(_paired(comms.group, source), target), tag)
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


def _assemble(graph: Graph, base: np.ndarray, comms: _Comms, flats: np.ndarray, counts: np.ndarray) -> Matches:
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
    return Matches(base, of_node, Ragged(offset, flats.astype(np.int64)), group, kind, op)


def _strangers(graph: Graph, comms: _Comms) -> list[str]:
    """Nodes that cannot take part in any match."""
    lines = []
    for i in np.flatnonzero(comms.place < 0):
        lines.append(f"{_who(graph, comms, i)}: the rank is no member of this group")
    for i in np.flatnonzero((comms.place >= 0) & np.isin(comms.op, P2P) & (comms.peer < 0)):
        lines.append(f"{_who(graph, comms, i)}: the peer is unknown")
    return lines


def _problems(graph: Graph, sorted_comms: _Comms, starts: np.ndarray, counts: np.ndarray) -> list[str]:
    """What is wrong with the matches that begin at ``starts``."""
    if not len(starts):
        return []
    op = sorted_comms.op
    pairwise = np.isin(op[starts], P2P)
    wanted = np.where(pairwise, 2, sorted_comms.size[starts])
    differ = np.zeros(len(starts), bool)
    owner = np.repeat(np.arange(len(starts)), counts)
    differ[owner[op != op[starts][owner]]] = True
    lines = []
    for m in np.flatnonzero((counts != wanted) | (differ & ~pairwise)):
        rows = np.arange(starts[m], starts[m] + counts[m])
        lines.append(_problem(graph, sorted_comms, rows, bool(pairwise[m]), bool(differ[m])))
    return lines


def _problem(graph: Graph, comms: _Comms, rows: np.ndarray, pairwise: bool, differ: bool) -> str:
    first, members = rows[0], graph.groups.members[comms.group[rows[0]]]
    who = _who(graph, comms, first)
    if pairwise:
        peer = members[comms.peer[first]]
        return f"{who}: rank {peer} has no {'send' if comms.op[first] == Op.RECV else 'receive'} for it"
    if differ:
        other = next(row for row in rows if comms.op[row] != comms.op[first])
        return f"{who}: but {_who(graph, comms, other)} is the same operation in order"
    missing = set(members.tolist()) - set(comms.rank[rows].tolist())
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


def _concatenate(arrays: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(arrays).astype(np.int64) if arrays else np.empty(0, np.int64)
