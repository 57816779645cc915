"""What every node takes, and how that is known: real measurement, probe, fit, or our own data plane."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from prism_tools.calibrate.hostbound import host_bound
from prism_tools.calibrate.measured import Measured, iteration_spread, middle, read_rows
from prism_tools.calibrate.probes import Finder, key_of, turned
from prism_tools.errors import PrismError
from prism_tools.graph.model import Durations, Graph
from prism_tools.graph.names import node_text
from prism_tools.graph.own import own_times
from prism_tools.graph.releases import releases
from prism_tools.graph.schema import HOST_LANE, UNKNOWN, Source

if TYPE_CHECKING:
    from prism_tools.graph.match import Matches

CLOCK_SHARE = 0.1  # clocks that may differ by more than this share of a duration do not tell who ended first


class _Flat:
    """Durations under construction: one entry per flat node, NaN where not known yet."""

    def __init__(self, total: int) -> None:
        self.own = np.full(total, np.nan)
        self.tail = np.zeros(total)
        self.spread = np.full(total, np.nan)
        self.bias = np.zeros(total)
        self.apart = np.zeros(total)  # by how much the ranks that stand for this one differ
        self.source = np.full(total, Source.UNKNOWN, np.uint8)


def durations(graph: Graph, matches: Matches) -> Durations:
    """Durations of all nodes from graph.timing and graph.probes.

    PrismError naming ranks, or a node of an iteration, that nobody measured.
    """
    measured = read_rows(graph)
    flat = _Flat(int(matches.base[-1]))
    for rank in range(graph.world_size):
        _fill_own(graph, matches, measured, rank, flat)
    rest = _fill_real(matches, graph, measured, flat)
    finder = Finder(graph.probes)
    held = _Held(measured)
    for match in rest:
        if not _fill_probe(graph, matches, match, finder, flat):
            _fill_emulated(matches, match, held, flat)
    _fill_apart(matches, measured, flat)
    return _packed(graph, matches, flat)


def _fill_own(graph: Graph, matches: Matches, measured: Measured, rank: int, flat: _Flat) -> None:
    program = graph.program_of(rank)
    rows = measured.rows[rank]
    samples = np.array([own_times(program, measured.start[row], measured.end[row]) for row in rows])
    doubt = host_bound(program, samples, [measured.end[row] - measured.issued[row] for row in rows])
    nodes = slice(int(matches.base[rank]), int(matches.base[rank + 1]))
    flat.own[nodes], flat.spread[nodes] = middle(samples)
    flat.bias[nodes] = doubt
    flat.source[nodes] = np.where(np.isnan(flat.own[nodes]), Source.UNKNOWN, Source.REAL)


def _fill_apart(matches: Matches, measured: Measured, flat: _Flat) -> None:
    """A rank that nobody measured is known no better than those that can stand in for it agree: half of their range."""
    stay = flat.own + flat.tail
    known: dict[tuple[int, ...], np.ndarray] = {}
    for rank, alike in measured.alike.items():
        key = tuple(alike)
        if key not in known:
            stays = np.array([stay[matches.base[other] : matches.base[other + 1]] for other in alike])
            known[key] = np.nan_to_num(stays.max(axis=0) - stays.min(axis=0)) / 2
        flat.apart[matches.base[rank] : matches.base[rank + 1]] = known[key]


def _fill_real(matches: Matches, graph: Graph, measured: Measured, flat: _Flat) -> list[int]:
    """Fill in matches whose members, or all their stand-ins, ran in one slice with their whole group (so on the real
    backend); returns the other matches."""
    batches: dict[tuple, tuple[list[int], list[np.ndarray], list]] = {}
    rest = []
    for match in range(len(matches)):
        nodes = _stood_in(matches, measured, match)
        ranks = tuple(matches.rank_of(node) for node in nodes)
        # Two ranks of a group that crosses the slice's edge meet in our own data plane, even when both are real.
        group = matches.group[matches.of_node[nodes[0]]] if len(nodes) else -1
        runs = measured.shared_runs(ranks, tuple(graph.groups.members[group].tolist())) if len(nodes) else []
        if not runs:
            rest.append(match)
            continue
        members = matches.members[match].tolist()
        gates = [([members.index(a) for a in gate], [members.index(b) for b in out])
                 for gate, out in releases(graph, matches, match)]  # fmt: skip
        numbers, own_nodes, _ = batches.setdefault((ranks, str(gates)), ([], [], [gates, runs]))
        numbers.append(match)
        own_nodes.append(nodes - matches.base[list(ranks)])
    for numbers, own_nodes, (gates, runs) in batches.values():
        duration, tails, spread, unseen = _measure(measured, runs, np.array(own_nodes), gates)
        for k, match in enumerate(numbers):
            if np.isnan(duration[k]):
                rest.append(match)
                continue
            members = matches.members[match]
            flat.own[members], flat.tail[members] = duration[k], tails[k]
            flat.spread[members], flat.bias[members] = spread[k], unseen[k]
            flat.source[members] = Source.REAL
    return rest


def _stood_in(matches: Matches, measured: Measured, match: int) -> np.ndarray:
    """The members of ``match``, or those of the match that their stand-ins make; empty if these make none."""
    members = matches.members[match]
    ranks = [matches.rank_of(member) for member in members]
    stand_in = measured.stand_in[ranks]
    if np.array_equal(stand_in, ranks):
        return members
    nodes = members - matches.base[ranks] + matches.base[stand_in]
    other = int(matches.of_node[nodes[0]])
    return nodes if other >= 0 and np.array_equal(matches.members[other], nodes) else nodes[:0]


def _measure(
    measured: Measured, runs: list[list[int]], nodes: np.ndarray, gates: list
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Duration [N], tails [N, K], spread [N, K] (NaN: one run only) and unseen tails [N, K] of N matches of the same K
    ranks.

    ``nodes``: int[N, K]; ``gates``: graph.equations.releases in positions. A member that waits for nobody shows the
    duration on its own clock: the least (end - ready). With one good clock, each member's end is taken from the
    arrival that releases it; the duration is the least of these, the tails are the differences, and a member's spread is
    how far its own stays differ between runs, if that is more than the durations do. Clocks that are not good enough for
    the duration still show a tail that is longer than their error. One that they do not show is no longer than their
    error, nor than the member ever stayed beyond the duration: that much of it is unseen.
    """
    size = nodes.shape[1]
    ready = np.array([[measured.ready[run[k]][nodes[:, k]] for k in range(size)] for run in runs], float)
    end = np.array([[measured.end[run[k]][nodes[:, k]] for k in range(size)] for run in runs], float)
    unknown = ((ready == UNKNOWN) | (end == UNKNOWN)).any(axis=1)  # [R, N]
    ready, end = ready.swapaxes(1, 2), end.swapaxes(1, 2)  # [R, N, K]
    held = (end - ready).min(axis=2)
    held[unknown] = np.nan
    duration, spread = middle(held)
    released = np.empty_like(ready)
    for arrivals, leavers in gates:
        released[:, :, leavers] = ready[:, :, arrivals].max(axis=2, keepdims=True)
    lag = np.maximum(end - released, 0)
    lag[unknown] = np.nan
    errors = np.array([[measured.error[row] for row in run] for run in runs])
    error = 2 * errors.max() if (errors >= 0).all() else np.inf
    typical, between = middle(lag)
    clocked = (error == 0) | (error <= CLOCK_SHARE * duration)
    duration = np.where(clocked, typical.min(axis=1), duration)
    spread = np.where(clocked, middle(lag.min(axis=2))[1], spread)
    tails = typical - duration[:, None]
    shown = clocked[:, None] | (tails > error)
    tails = np.where(shown, np.maximum(tails, 0), 0)
    stays = np.where(unknown[:, :, None], np.inf, end - ready).min(axis=0)
    unseen = np.where(shown, 0, np.clip(stays - duration[:, None], 0, error))
    return duration, tails, np.fmax(spread[:, None], np.where(shown, between, np.nan)), unseen


def _fill_probe(graph: Graph, matches: Matches, match: int, finder: Finder, flat: _Flat) -> bool:
    found = finder.find(key_of(graph, matches, match))
    if found is None:
        return False
    members = matches.members[match]
    flat.own[members], flat.spread[members], flat.bias[members] = found.duration, found.spread, found.bias
    flat.tail[members] = turned(graph, matches, match, found.tails)
    flat.source[members] = found.source
    for member, issue in zip(members.tolist(), turned(graph, matches, match, found.issue), strict=True):
        rank, node = matches.rank_of(member), matches.node_of(member)
        lane = graph.program_of(rank).lane
        if lane[node] != HOST_LANE and node + 1 < len(lane):  # the slice left out what our data plane took to issue it
            flat.own[member + 1] += issue
    return True


class _Held:
    """Per rank the typical (end - ready) of each node and its spread; kept."""

    def __init__(self, measured: Measured) -> None:
        self._measured = measured
        self._known: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def of(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        rank = int(self._measured.stand_in[rank])
        if rank not in self._known:
            samples = []
            for row in self._measured.rows[rank]:
                ready, end = self._measured.ready[row], self._measured.end[row]
                known = (ready != UNKNOWN) & (end != UNKNOWN)
                samples.append(np.where(known, np.maximum(end - ready, 0), np.nan))
            self._known[rank] = middle(np.array(samples))
        return self._known[rank]


def _fill_emulated(matches: Matches, match: int, held: _Held, flat: _Flat) -> None:
    """The least time that a measured member spent in our own data plane."""
    members = matches.members[match]
    shown = []
    for member in members:
        typical, spread = held.of(matches.rank_of(member))
        node = matches.node_of(member)
        if not np.isnan(typical[node]):
            shown.append((typical[node], spread[node]))
    if shown:
        flat.own[members], flat.spread[members] = min(shown)
        flat.source[members] = Source.EMULATED


def _packed(graph: Graph, matches: Matches, flat: _Flat) -> Durations:
    """Per timing class, as integers. Nodes before and after the iterations may stay unknown: they count as 0."""
    row = np.zeros(graph.world_size, np.int32)
    known: dict[bytes, int] = {}
    packed = Durations(row, [], [], [], [], [])
    for rank in range(graph.world_size):
        nodes = slice(int(matches.base[rank]), int(matches.base[rank + 1]))
        program, own, source = graph.program_of(rank), flat.own[nodes], flat.source[nodes]
        lost = np.flatnonzero(np.isnan(own) & (program.segment >= 0))
        if len(lost):
            what = node_text(graph, rank, int(lost[0]))
            raise PrismError(f"{what} was never measured; run prism-slice for rank {rank} again")
        own = np.rint(np.nan_to_num(own)).astype(np.int64)
        tail = np.rint(flat.tail[nodes]).astype(np.int64)
        spread = flat.spread[nodes]
        spread = np.where(np.isnan(spread), iteration_spread(program, own + tail), spread)
        spread = np.maximum(spread, flat.apart[nodes])
        spread = np.rint(spread).astype(np.int64)
        bias = np.rint(flat.bias[nodes]).astype(np.int64)
        key = b"".join(column.tobytes() for column in (own, tail, spread, bias, source))
        row[rank] = known.setdefault(key, len(known))
        if row[rank] == len(packed.own):
            packed.own.append(own)
            packed.tail.append(tail)
            packed.spread.append(spread)
            packed.bias.append(bias)
            packed.source.append(source)
    return packed
