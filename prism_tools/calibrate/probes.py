"""Looking up operations that were measured alone: the exact one, else a fit to those of other sizes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from prism_tools.calibrate.entries import Entries
from prism_tools.graph.model import Graph, Probes
from prism_tools.graph.schema import Op, Source

if TYPE_CHECKING:
    from prism_tools.graph.match import Matches


@dataclass(frozen=True)
class Key:
    """What a probe measures and is found by: ``bytes`` contributed by each of ``size`` members (graph/model.py, Probes). A send
    and its receive are one ``SEND`` of two members."""

    op: int
    dtype: int
    reduce: int
    size: int
    bytes: int


@dataclass(frozen=True)
class Found:
    """A probe's answer: duration, tails and cost of issuing by place (Entries.place), and half-widths, ns.

    ``source``: PROBE if just this operation was measured, by as many processes as it has members; else FIT.
    """

    duration: int
    tails: np.ndarray
    issue: np.ndarray
    spread: int
    bias: int
    source: Source


def keys_of(graph: Graph, matches: Matches, entries: Entries, chosen: np.ndarray) -> tuple[list[Key], np.ndarray]:
    """The distinct keys of the ``chosen`` matches, and which is whose: int64[chosen]."""
    first = [entries.column(graph, name)[entries.first[chosen]] for name in ("dtype", "reduce")]
    op = np.where(matches.op == Op.RECV, Op.SEND, matches.op).astype(np.int64)[chosen]
    columns = np.stack([op, *first, entries.size[chosen], entries.bytes(graph, matches)[chosen]], 1)
    distinct, back = np.unique(columns, axis=0, return_inverse=True)
    return [Key(*row) for row in distinct.tolist()], back.reshape(-1)


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
        the next larger one, or the nearest; the bias is what the difference in bytes, and in processes, may cost. None: no
        such probe.
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
        if probes.processes[row] < key.size:  # at worst it is proportional to the members
            bias += round(duration * (1 - int(probes.processes[row]) / key.size))
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
