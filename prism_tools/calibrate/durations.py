"""What every node takes, and how that is known: real measurement, probe, fit, or our own data plane."""

from __future__ import annotations

import numpy as np

from prism_tools.calibrate.entries import Entries
from prism_tools.calibrate.hostbound import host_bound
from prism_tools.calibrate.measured import Measured, alike, iteration_spread, middle, read_rows
from prism_tools.calibrate.probes import Finder, keys_of
from prism_tools.errors import PrismError
from prism_tools.graph.classes import classes_of
from prism_tools.graph.match import Matches, find_matches
from prism_tools.graph.model import Durations, Graph, Program
from prism_tools.graph.names import node_text
from prism_tools.graph.own import own_times
from prism_tools.graph.releases import WITH_ROOT, releases
from prism_tools.graph.schema import HOST_LANE, UNKNOWN, Kind, Source

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


def from_measurements(graph: Graph) -> Durations:
    """``durations`` for one rank of each class."""
    measured = read_rows(graph)
    return durations(graph, find_matches(graph, classes=classes_of(graph, alike(graph, measured))), measured)


def durations(graph: Graph, matches: Matches, measured: Measured | None = None) -> Durations:
    """Durations of all nodes from graph.timing (``measured``: as read) and graph.probes.

    Ranks of one of ``matches.classes`` must have equal numbers by ``alike``. PrismError naming ranks, or a node of an
    iteration, that nobody measured.
    """
    measured = measured or read_rows(graph)
    flat = _Flat(int(matches.base[-1]))
    for k, rank in enumerate(matches.classes.lowest.tolist()):
        _fill_own(graph, measured, rank, flat, slice(int(matches.base[k]), int(matches.base[k + 1])))
    entries = Entries(graph, matches)
    rest = _fill_real(graph, matches, entries, measured, flat)
    rest = _fill_probed(graph, matches, entries, rest, flat)
    _fill_emulated(matches, entries, rest, measured, flat)
    _fill_apart(matches, measured, flat)
    return _packed(graph, matches, flat)


def _fill_own(graph: Graph, measured: Measured, rank: int, flat: _Flat, nodes: slice) -> None:
    program = graph.program_of(rank)
    rows = measured.rows[rank]
    samples = np.array([own_times(program, measured.start[row], measured.end[row]) for row in rows])
    doubt = host_bound(program, samples, [measured.end[row] - measured.issued[row] for row in rows])
    flat.own[nodes], flat.spread[nodes] = middle(samples)
    flat.bias[nodes] = doubt
    flat.source[nodes] = np.where(np.isnan(flat.own[nodes]), Source.UNKNOWN, Source.REAL)


def _fill_apart(matches: Matches, measured: Measured, flat: _Flat) -> None:
    """A rank that nobody measured is known no better than those that can stand in for it agree: half of their range."""
    stay = flat.own + flat.tail
    of_rank = matches.classes.of_rank
    known: dict[tuple[int, ...], np.ndarray] = {}
    for k, rank in enumerate(matches.classes.lowest.tolist()):
        others = measured.alike.get(rank)
        if others is None:
            continue
        key = tuple(others)
        if key not in known:
            stays = np.array(
                [stay[matches.base[of_rank[other]] : matches.base[of_rank[other] + 1]] for other in others]
            )
            known[key] = np.nan_to_num(stays.max(axis=0) - stays.min(axis=0)) / 2
        flat.apart[matches.base[k] : matches.base[k + 1]] = known[key]


def _fill_real(graph: Graph, matches: Matches, entries: Entries, measured: Measured, flat: _Flat) -> np.ndarray:
    """Fill in matches whose members, or all their stand-ins, ran in one slice with their whole group (so on the real
    backend); returns bool[M]: the other matches."""
    batches: dict[tuple, tuple[list[int], list[np.ndarray], list]] = {}
    rest = np.ones(len(matches), bool)
    nodes, stand_in = _stood_in(matches, entries, measured), measured.stand_in[entries.rank]
    for match in np.flatnonzero(_meet(matches, entries, nodes)).tolist():
        mine = slice(int(entries.first[match]), int(matches.members.offset[match + 1]))
        ranks = tuple(stand_in[mine].tolist())
        # Two ranks of a group that crosses the slice's edge meet in our own data plane, even when both are real.
        group = int(matches.group[matches.of_node[nodes[mine.start]]])
        rooted = matches.kind[match] in WITH_ROOT
        key = (ranks, group, int(matches.kind[match]), entries.place[mine].tobytes() if rooted else b"")
        if key not in batches:
            members = matches.members[match].tolist()
            gates = [([members.index(a) for a in gate], [members.index(b) for b in out])
                     for gate, out in releases(graph, matches, match)]  # fmt: skip
            runs = measured.shared_runs(ranks, tuple(graph.groups.members[group].tolist()))
            batches[key] = [], [], [gates, runs]
        numbers, own_nodes, _ = batches[key]
        numbers.append(match)
        own_nodes.append(entries.node[mine])
    for numbers, own_nodes, (gates, runs) in batches.values():
        if not runs:
            continue
        duration, tails, spread, unseen = _measure(measured, runs, np.array(own_nodes), gates)
        known = np.flatnonzero(~np.isnan(duration))
        members = np.array([matches.members[numbers[k]] for k in known]).reshape(len(known), -1)
        flat.own[members], flat.tail[members] = duration[known, None], tails[known]
        flat.spread[members], flat.bias[members] = spread[known], unseen[known]
        flat.source[members] = Source.REAL
        rest[np.array(numbers)[known]] = False
    return rest


def _stood_in(matches: Matches, entries: Entries, measured: Measured) -> np.ndarray:
    """int64[entries]: flat nodes of the stand-ins' operations."""
    return matches.base[matches.classes.of_rank[measured.stand_in[entries.rank]]] + entries.node


def _meet(matches: Matches, entries: Entries, nodes: np.ndarray) -> np.ndarray:
    """bool[M]: whether the entries' ``nodes`` are all members of one match, each for one rank."""
    if not len(matches):
        return np.zeros(0, bool)
    other = matches.of_node[nodes]
    mine = other[entries.first]
    count = np.diff(matches.members.offset)
    same = (mine >= 0) & (count == entries.size) & (count == count[mine])
    theirs = matches.members.offset[mine][entries.match] + np.arange(len(nodes)) - entries.first[entries.match]
    equal = matches.members.data[np.minimum(theirs, len(nodes) - 1)] == nodes
    return same & np.logical_and.reduceat(equal, entries.first)


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


def _fill_probed(graph: Graph, matches: Matches, entries: Entries, rest: np.ndarray, flat: _Flat) -> np.ndarray:
    """Fill in those of the matches ``rest`` that were measured alone; returns bool[M]: which are left."""
    chosen = np.flatnonzero(rest)
    keys, of_chosen = keys_of(graph, matches, entries, chosen)
    key = np.full(len(matches), -1)
    key[chosen] = of_chosen
    finder, left = Finder(graph.probes), rest.copy()
    issued = entries.of(graph, [_issued(program) for program in graph.programs]) > 0
    for number, wanted in enumerate(keys):
        found = finder.find(wanted)
        if found is None:
            continue
        mine = np.flatnonzero(key[entries.match] == number)
        members, place = entries.flat[mine], entries.place[mine]
        flat.own[members], flat.spread[members], flat.bias[members] = found.duration, found.spread, found.bias
        flat.tail[members], flat.source[members] = found.tails[place], found.source
        left[entries.match[mine]] = False
        late = mine[issued[mine]]
        flat.own[entries.flat[late] + 1] += found.issue[entries.place[late]]
    return left


def _issued(program: Program) -> np.ndarray:
    """bool[n]: after the node comes a span of which the slice left out what our data plane took to issue it."""
    spans = np.append(program.kind[1:] == Kind.COMPUTE, False)[: len(program)]
    return (program.lane != HOST_LANE) & spans


def _fill_emulated(matches: Matches, entries: Entries, rest: np.ndarray, measured: Measured, flat: _Flat) -> None:
    """In the matches ``rest``: the least time that a measured member spent in our own data plane."""
    mine = np.flatnonzero(rest[entries.match])
    held = {rank: _held(measured, rank) for rank in set(measured.stand_in[entries.rank[mine]].tolist())}
    shown = np.full((len(mine), 2), np.nan)
    for at, (rank, node) in enumerate(zip(measured.stand_in[entries.rank[mine]], entries.node[mine], strict=True)):
        shown[at] = held[int(rank)][:, node]
    match = entries.match[mine]
    order = np.lexsort((shown[:, 1], shown[:, 0], match))
    least = order[np.flatnonzero(np.diff(match[order], prepend=-1))]
    for number, (typical, spread) in zip(match[least].tolist(), shown[least].tolist(), strict=True):
        if not np.isnan(typical):
            members = matches.members[number]
            flat.own[members], flat.spread[members], flat.source[members] = typical, spread, Source.EMULATED


def _held(measured: Measured, rank: int) -> np.ndarray:
    """float[2, n]: a measured rank's typical (end - ready) of each node, and its spread."""
    samples = []
    for row in measured.rows[rank]:
        ready, end = measured.ready[row], measured.end[row]
        known = (ready != UNKNOWN) & (end != UNKNOWN)
        samples.append(np.where(known, np.maximum(end - ready, 0), np.nan))
    return np.stack(middle(np.array(samples)))


def _packed(graph: Graph, matches: Matches, flat: _Flat) -> Durations:
    """Per timing class, as integers. Nodes before and after the iterations may stay unknown: they count as 0."""
    row = np.zeros(len(matches.classes), np.int32)
    known: dict[bytes, int] = {}
    packed = Durations(row, [], [], [], [], [])
    for k, rank in enumerate(matches.classes.lowest.tolist()):
        nodes = slice(int(matches.base[k]), int(matches.base[k + 1]))
        program, own = graph.program_of(rank), flat.own[nodes]
        lost = np.flatnonzero(np.isnan(own) & (program.segment >= 0))
        if len(lost):
            what = node_text(graph, rank, int(lost[0]))
            raise PrismError(f"{what} was never measured; run prism-slice for rank {rank} again")
        own, tail, bias = (_whole(column) for column in (np.nan_to_num(own), flat.tail[nodes], flat.bias[nodes]))
        spread = flat.spread[nodes]
        spread = np.where(np.isnan(spread), iteration_spread(program, own + tail), spread)
        parts = {"own": own, "tail": tail, "spread": _whole(np.maximum(spread, flat.apart[nodes])), "bias": bias}
        parts["source"] = flat.source[nodes]
        row[k] = known.setdefault(b"".join(part.tobytes() for part in parts.values()), len(known))
        if row[k] == len(packed.own):
            for name, part in parts.items():
                getattr(packed, name).append(part)
    packed.row = row[matches.classes.of_rank]
    return packed


def _whole(values: np.ndarray) -> np.ndarray:
    return np.rint(values).astype(np.int64)
