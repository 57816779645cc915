"""Looking up operations that were measured alone: the exact one, else a fit to those of other sizes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from prism_tools.graph.model import Graph, Probes
from prism_tools.graph.releases import root_of
from prism_tools.graph.schema import Op, Source

if TYPE_CHECKING:
    from prism_tools.graph.match import Matches


@dataclass(frozen=True)
class Key:
    """What a probe is found by. A send and its receive are one ``SEND`` of two members."""

    op: int
    dtype: int
    reduce: int
    size: int
    bytes: int


@dataclass(frozen=True)
class Found:
    """A probe's answer: duration, tails and cost of issuing by group rank (sender, receiver), and half-widths, ns.

    ``source``: PROBE if just this operation was measured, by as many processes as it has members; else FIT.
    """

    duration: int
    tails: np.ndarray
    issue: np.ndarray
    spread: int
    bias: int
    source: Source


def key_of(graph: Graph, matches: Matches, match: int) -> Key:
    """The key of ``match``. Bytes: for all_to_all the mean over members of what they contribute, else the largest
    contribution (a receiver's is 0, and a non-root's may be)."""
    members = matches.members[match]
    places = [(matches.rank_of(member), matches.node_of(member)) for member in members]
    contributed = [int(graph.values_of(rank).bytes[node]) for rank, node in places]
    rank, node = places[0]
    program = graph.program_of(rank)
    op = Op(int(program.op[node]))
    amount = round(sum(contributed) / len(contributed)) if op == Op.ALL_TO_ALL else max(contributed)
    op = Op.SEND if op == Op.RECV else op
    return Key(op, int(program.dtype[node]), int(program.reduce[node]), len(members), amount)


def turned(graph: Graph, matches: Matches, match: int, tails: np.ndarray) -> np.ndarray:
    """``tails``, measured with root 0, for the members of ``match`` in group-rank order."""
    root = root_of(graph, matches, match)
    return np.roll(tails, matches.members[match].tolist().index(root[0])) if root else tails


class Finder:
    """Probes by key; answers are kept."""

    def __init__(self, probes: Probes | None) -> None:
        self._probes = probes
        self._rows: dict[tuple[int, int], list[int]] = {}
        self._known: dict[Key, Found | None] = {}
        for row in range(len(probes.op) if probes else 0):
            assert probes is not None
            op = Op.SEND if probes.op[row] == Op.RECV else int(probes.op[row])
            self._rows.setdefault((op, int(probes.size[row])), []).append(row)

    def find(self, key: Key) -> Found | None:
        """The probe with this key, else what those of equal op and size say of its bytes: a line between the next smaller and
        the next larger one, or the nearest; the bias is what the difference in bytes may cost. None: no such probe.
        """
        if key not in self._known:
            self._known[key] = self._find(key)
        return self._known[key]

    def _find(self, key: Key) -> Found | None:
        rows, probes = self._rows.get((key.op, key.size)), self._probes
        if not rows or probes is None:
            return None

        def distance(row: int) -> tuple[float, bool, bool]:
            far = abs(math.log((int(probes.bytes[row]) + 1) / (key.bytes + 1)))
            return far, probes.dtype[row] != key.dtype, probes.reduce[row] != key.reduce

        row = min(rows, key=distance)
        duration, spread, bias, source = int(probes.duration[row]), int(probes.spread[row]), 0, Source.FIT
        less = [other for other in rows if probes.bytes[other] < key.bytes]
        more = [other for other in rows if probes.bytes[other] > key.bytes]
        if probes.bytes[row] == key.bytes:
            exact = probes.dtype[row] == key.dtype and probes.reduce[row] == key.reduce
            source = Source.PROBE if exact and probes.processes[row] == key.size else Source.FIT
        elif less and more:
            duration, spread, bias = self._between(min(less, key=distance), min(more, key=distance), key.bytes)
        else:  # at worst the time is proportional to the bytes
            small, large = sorted((int(probes.bytes[row]), key.bytes))
            bias = round(duration * (1 - small / large))
        return Found(duration, probes.tails[row], probes.issue[row], spread, bias, source)

    def _between(self, less: int, more: int, size: int) -> tuple[int, int, int]:
        """Duration, spread and bias, ns, of ``size`` bytes on the line through two rows. More bytes never take less: midway the
        truth may lie anywhere between the two, near one of them only near it."""
        probes = self._probes
        assert probes is not None
        share = (size - int(probes.bytes[less])) / (int(probes.bytes[more]) - int(probes.bytes[less]))
        low, high = int(probes.duration[less]), int(probes.duration[more])
        doubt = 2 * share * (1 - share) * abs(high - low)
        spread = max(int(probes.spread[less]), int(probes.spread[more]))
        return round(low + share * (high - low)), spread, round(doubt)
