"""Which nodes of different ranks are one communication: collectives by group and order, sends with receives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from prism_tools.errors import PrismError
from prism_tools.graph.classes import Classes, everybody
from prism_tools.graph.compiled import Kernel
from prism_tools.graph.members import concatenated
from prism_tools.graph.model import Graph, Ragged
from prism_tools.graph.names import callsite_text, op_text, ranks_text
from prism_tools.graph.schema import P2P, Match, Op
from prism_tools.graph.seats import Lists, Seats, seats_of
from prism_tools.graph.semantics import EAGER_BYTES, match_kind

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


def find_matches(graph: Graph, strict: bool = True, classes: Classes | None = None) -> Matches:
    """Match every COMM node: the n-th collective of each member of a group, the n-th send of a channel (group, source,
    destination, tag) with its n-th receive. With ``classes`` the nodes of one rank of each, which stands for the others.

    PrismError if a match lacks members or its members' operations differ; ``strict=False`` lists these in ``problems``.
    """
    classes = classes or everybody(graph)
    lengths = np.array([len(program) for program in graph.programs], np.int64)[graph.ranks.program[classes.lowest]]
    base = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    seats, lists = seats_of(graph, classes, base)
    gathering = _collectives(seats.take(seats.known & ~seats.pair), classes, lists)
    pairs = _pairs(seats.take(seats.known & seats.pair), classes, lists)
    matches, differ = _assemble(graph, classes, base, lists, gathering, pairs)
    matches.problems = _strangers(graph, matches, seats.take(~seats.known), lists) + _problems(graph, matches, differ)
    if strict and (problems := matches.problems):
        more = f" (and {len(problems) - 1} more problems)" if len(problems) > 1 else ""
        raise PrismError(
            f"{problems[0]}{more}; the recording is incomplete or the program mixes up its operations, "
            "see prism-inspect check",
            detail="\n".join(problems[1:SHOWN]),
        )
    return matches


@dataclass
class _Channels:
    """Seats in the order of their matches' members. The n-th nodes of the seats of one channel are one match.

    ``channel``: int64, ascends; ``tied``: how many of the seats before have the same rank and place in the channel:
    their nodes come in program order."""

    seats: Seats
    channel: np.ndarray
    tied: np.ndarray


def _collectives(seats: Seats, classes: Classes, lists: Lists) -> _Channels:
    """Members by group rank. Groups of one class are one channel."""
    keys = [classes.of_group[seats.group], seats.place, seats.owner, seats.group]
    found, keys = _in_order(seats, lists, keys)
    return _Channels(found, _runs(keys[:1])[0], _runs(keys[:3])[1])


def _pairs(seats: Seats, classes: Classes, lists: Lists) -> _Channels:
    """The sender comes first. A channel is known by its source's class, in which slot that has the group, how much
    further on the destination is in it, and the tag."""
    members = classes.members
    sender = classes.of_rank[members.rank[seats.source]]
    keys = [sender, members.slot[seats.source], seats.further, seats.tag, seats.receives]
    found, keys = _in_order(seats, lists, keys)
    return _Channels(found, _runs(keys[:4])[0], np.zeros(len(found.at), np.int64))


def _in_order(seats: Seats, lists: Lists, keys: list[np.ndarray]) -> tuple[Seats, list[np.ndarray]]:
    """The seats by the first key, then the second, …; and their keys. Those with equal keys (of a rank that has a group in
    two slots) become one, whose list is appended to ``lists``."""
    order = np.lexsort(keys[::-1])
    seats, keys = seats.take(order), [key[order] for key in keys]
    starts = _starts(*keys)
    many, size = np.diff(np.append(starts, len(order))), len(lists.node)
    chosen, flats = [], []
    for k in np.flatnonzero(many > 1).tolist():
        first, alike = int(starts[k]), slice(int(starts[k]), int(starts[k] + many[k]))
        at = concatenated([np.arange(a, a + n) for a, n in zip(seats.at[alike], seats.count[alike], strict=True)])
        flat = lists.node[at] + np.repeat(seats.base[alike], seats.count[alike])
        seats.at[first], seats.count[first], seats.base[first] = size, len(at), 0
        chosen.append(at[np.argsort(flat)])
        flats.append(np.sort(flat))
        size += len(at)
    lists.append(chosen, flats)
    return seats.take(starts), [key[starts] for key in keys]


def _runs(keys: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The number of the run of equal keys that each is in, and its place in that run."""
    starts = _starts(*keys)
    many = np.diff(np.append(starts, len(keys[0])))
    return np.repeat(np.arange(len(starts)), many), np.arange(len(keys[0])) - np.repeat(starts, many)


def _starts(*keys: np.ndarray) -> np.ndarray:
    """Where runs of equal keys begin."""
    differ = np.zeros(len(keys[0]), bool)
    differ[:1] = True
    for key in keys:
        differ[1:] |= key[1:] != key[:-1]
    return np.flatnonzero(differ)


def _assemble(
    graph: Graph, classes: Classes, base: np.ndarray, lists: Lists, gathering: _Channels, pairs: _Channels
) -> tuple[Matches, np.ndarray]:
    """The matches, and in which of them members' operations differ."""
    first, count = [], 0
    for part in (gathering, pairs):
        starts = _starts(part.channel)
        longest = np.maximum.reduceat(part.seats.count, starts) if len(starts) else starts
        first.append((count + np.cumsum(longest) - longest)[part.channel])
        count += int(longest.sum())
    seats = gathering.seats.joined(pairs.seats)
    of_node = np.full(base[-1], -1, np.int32)
    offset, member = np.zeros(count + 1, np.int64), np.empty(int(seats.count.sum()), np.int64)
    group, op, nbytes = np.zeros(count, np.int32), np.zeros(count, np.uint8), np.zeros(count, np.int64)
    differ = np.zeros(count, bool)
    _seat(
        len(member), np.concatenate(first), np.append(gathering.tied, pairs.tied), seats.at, seats.count, seats.base,
        seats.group, lists.node, lists.op, lists.bytes, of_node, offset, member, group, op, nbytes, differ,
    )  # fmt: skip
    kind = np.zeros(count, np.uint8)
    for backend in set(graph.groups.backend):
        theirs = np.array([name == backend for name in graph.groups.backend], bool)[group]
        for number in np.unique(op).tolist():
            kind[theirs & (op == number)] = match_kind(backend, Op(number))
        kind[theirs & (kind == Match.PAIR) & (nbytes <= EAGER_BYTES.get(backend, -1))] = Match.EAGER
    return Matches(base, of_node, Ragged(offset, member), group, kind, op, classes), differ


@Kernel
def _seat(
    first, tied, at, count, base, group_of, node, op_of, bytes_of, of_node, offset, member, group, op, nbytes, differ
):  # fmt: skip
    """Put every seat's nodes into its matches, from ``first`` on; ``group``, ``op``, ``nbytes``: of the first member."""
    for seat in range(len(first)):
        for k in range(count[seat]):
            offset[first[seat] + k + 1] += 1
    for match in range(len(offset) - 1):
        offset[match + 1] += offset[match]
    free = offset[:-1].copy()
    for seat in range(len(first)):
        for k in range(count[seat]):
            match, listed = first[seat] + k, at[seat] + k
            flat, place = base[seat] + node[listed], free[match]
            of_node[flat] = match
            free[match] += 1
            if place > offset[match] and op[match] != op_of[listed]:
                differ[match] = True
            for _ in range(tied[seat]):
                if place > offset[match] and member[place - 1] > flat:
                    member[place] = member[place - 1]
                    place -= 1
            member[place] = flat
            if place == offset[match]:
                group[match], op[match], nbytes[match] = group_of[seat], op_of[listed], bytes_of[listed]


def _strangers(graph: Graph, matches: Matches, seats: Seats, lists: Lists) -> list[str]:
    """Nodes that cannot take part in any match: ``seats`` of ranks that are not in the group, or with unknown peers."""
    found = []
    for k in range(len(seats.at)):
        what = "the rank is no member of this group" if seats.place[k] < 0 else "the peer is unknown"
        nodes = lists.node[seats.at[k] : seats.at[k] + seats.count[k]] + seats.base[k]
        found += [(bool(seats.place[k] >= 0), node, what) for node in nodes.tolist()]
    return [f"{_who(graph, matches, node)}: {what}" for _, node, what in sorted(found)]


def _problems(graph: Graph, matches: Matches, differ: np.ndarray) -> list[str]:
    """What is wrong with the matches; ``differ``: their members' operations do."""
    if not len(matches):
        return []
    size, pairwise = np.diff(matches.members.offset), np.isin(matches.op, P2P)
    wanted = np.where(pairwise, 2, _members_of_classes(graph, matches.classes)[matches.group])
    wrong = np.flatnonzero((size != wanted) | (differ & ~pairwise))
    return [_problem(graph, matches, match, bool(pairwise[match]), bool(differ[match])) for match in wrong.tolist()]


def _members_of_classes(graph: Graph, classes: Classes) -> np.ndarray:
    """int64[groups]: how many members a collective of each group has, those of one class and slot taken together."""
    members = classes.members
    if len(classes) == graph.world_size:
        return members.size
    code = classes.of_rank[members.rank].astype(np.int64) * len(members.rank) + members.slot + 1
    order = np.lexsort((code, members.group))
    first = _starts(members.group[order], code[order])
    return np.bincount(members.group[order][first], minlength=len(members.size))


def _problem(graph: Graph, matches: Matches, match: int, pairwise: bool, differ: bool) -> str:
    flats, classes = matches.members[match].tolist(), matches.classes
    members = graph.groups.members[matches.group[match]]
    ranks = [matches.rank_of(flat) for flat in flats]
    ops = [int(graph.program_of(rank).op[matches.node_of(flat)]) for rank, flat in zip(ranks, flats, strict=True)]
    who = _who(graph, matches, flats[0])
    if pairwise:
        peer = _peer(graph, ranks[0], matches.node_of(flats[0]))
        return f"{who}: rank {peer} has no {'send' if ops[0] == Op.RECV else 'receive'} for it"
    if differ:
        other = next(flat for flat, op in zip(flats, ops, strict=True) if op != ops[0])
        return f"{who}: but {_who(graph, matches, other)} is the same operation in order"
    came = set(ranks)
    missing = {rank for rank in members.tolist() if int(classes.lowest[classes.of_rank[rank]]) not in came}
    return f"{who}: no counterpart on ranks {ranks_text(missing)}"


def _peer(graph: Graph, rank: int, node: int) -> int:
    """The rank that a send or receive is to or from."""
    program = graph.program_of(rank)
    group = int(graph.ranks.slots[rank][program.slot[node]])
    members = graph.groups.members[group]
    return int(members[(graph.group_rank(group, rank) + int(program.peer[node])) % len(members)])


def _who(graph: Graph, matches: Matches, flat: int) -> str:
    rank, node = matches.rank_of(flat), matches.node_of(flat)
    program = graph.program_of(rank)
    group, op = int(graph.ranks.slots[rank][program.slot[node]]), int(program.op[node])
    site = callsite_text(graph, rank, node)
    peer = ""
    if op in P2P and program.peer[node] >= 0:
        peer = f" {'from' if op == Op.RECV else 'to'} rank {_peer(graph, rank, node)}"
    return f"rank {rank} {op_text(op)}{peer} on {graph.groups.name[group]}, node {node}" + (
        f" ({site})" if site else ""
    )
