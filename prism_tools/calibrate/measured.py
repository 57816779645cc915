"""The measured rows of a graph: on one clock, with a stand-in for ranks that were not measured, and their own times."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prism_tools.errors import PrismError
from prism_tools.graph.members import Members
from prism_tools.graph.model import Graph, Probes, Program, Timing
from prism_tools.graph.names import ranks_text
from prism_tools.graph.schema import P2P, UNKNOWN


@dataclass
class Measured:
    """Rows of graph.timing, their times on the leader's clock (UNKNOWN stays UNKNOWN).

    ``stand_in[r]``: the rank whose measurements rank r uses (itself if it was measured); ``alike``: an unmeasured rank → all
    that could stand in for it as well as that one; ``rows[r]``: the stand-in's rows;
    ``runs[r]``: (slice, repeat) -> row of rank r itself.
    """

    issued: list[np.ndarray]
    start: list[np.ndarray]
    ready: list[np.ndarray]
    end: list[np.ndarray]
    error: np.ndarray
    stand_in: np.ndarray
    alike: dict[int, list[int]]
    rows: list[list[int]]
    runs: list[dict[tuple[int, int], int]]

    def shared_runs(self, ranks: tuple[int, ...], group: tuple[int, ...]) -> list[list[int]]:
        """The rows of ``ranks``, in their order, of every run in which all of their ``group`` were measured."""
        rest, whole = [self.runs[rank] for rank in ranks], [self.runs[rank] for rank in group]
        return [[runs[key] for runs in rest] for key in self.runs[ranks[0]] if all(key in runs for runs in whole)]


def read_rows(graph: Graph) -> Measured:
    """All measurements of ``graph``; PrismError naming the ranks that have none and nobody to stand in for them."""
    timing = graph.timing
    if timing is None or not len(timing.rank):
        raise PrismError("no rank was ever measured; run prism-slice first")
    runs: list[dict[tuple[int, int], int]] = [{} for _ in range(graph.world_size)]
    for row, rank in enumerate(timing.rank.tolist()):
        runs[rank][int(timing.slice[row]), int(timing.repeat[row])] = row
    stand_in, alike = _stand_ins(graph, [bool(mine) for mine in runs])
    return Measured(
        issued=_align(timing, timing.host_issue),
        start=_align(timing, timing.start),
        ready=_align(timing, timing.ready),
        end=_align(timing, timing.end),
        error=timing.clock_error,
        stand_in=stand_in,
        alike=alike,
        rows=[list(runs[rank].values()) for rank in stand_in],
        runs=runs,
    )


def alike(graph: Graph, measured: Measured) -> np.ndarray:
    """int64[W]: equal numbers for ranks of one program whose durations are equal if their groups are of the same classes:
    the same rank stands for them, and where probes tell the members of a group apart they have the same place."""
    members = Members(graph)
    counts = np.diff(members.slot_start)
    rank = np.repeat(np.arange(graph.world_size), counts)
    slot = np.arange(len(rank)) - np.repeat(members.slot_start[:-1], counts)
    place = members.place(members.slot_group, rank)
    size = members.size[members.slot_group]
    told = np.zeros((graph.world_size, int(counts.max(initial=0))), np.int64)
    roots = set().union({0}, *(program.root[program.root > 0].tolist() for program in graph.programs))
    for many, number in _told_apart(graph.probes, roots).items():
        here = size == many
        told[rank[here], slot[here]] = number[place[here]]
    stands = {tuple(others): k for k, others in enumerate(measured.alike.values(), 1)}
    for_it = [stands[tuple(measured.alike[r])] if r in measured.alike else 0 for r in range(graph.world_size)]
    columns = np.column_stack([graph.ranks.values, measured.stand_in, for_it, told])
    return np.unique(columns, axis=0, return_inverse=True)[1].reshape(-1)


def _told_apart(probes: Probes | None, roots: set[int]) -> dict[int, np.ndarray]:
    """Size of groups → a number for each place, equal where all probes of this size show the same, whatever the root."""
    rows: dict[int, list[np.ndarray]] = {}
    for k in np.flatnonzero(~np.isin(probes.op, P2P)).tolist() if probes is not None else ():
        assert probes is not None
        turned = [np.roll(row, root) for row in (probes.tails[k], probes.issue[k]) for root in roots]
        rows.setdefault(int(probes.size[k]), []).extend(turned)
    return {
        size: np.unique(np.array(found), axis=1, return_inverse=True)[1].reshape(-1) for size, found in rows.items()
    }


def middle(samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Median and half the interquartile range over axis 0, NaN ignored; NaN where none, or only one, is known."""
    flat = samples.reshape(len(samples), -1)
    median, spread = np.full(flat.shape[1], np.nan), np.full(flat.shape[1], np.nan)
    known = np.sum(~np.isnan(flat), axis=0)
    for count in range(1, len(flat) + 1):
        chosen = np.flatnonzero(known == count)
        if len(chosen):
            low, median[chosen], high = np.percentile(np.sort(flat[:, chosen], axis=0)[:count], (25, 50, 75), axis=0)
            if count > 1:
                spread[chosen] = (high - low) / 2
    return median.reshape(samples.shape[1:]), spread.reshape(samples.shape[1:])


def places(program: Program) -> np.ndarray:
    """int64[K, n]: the nodes of each of the K iterations of the usual length, so that a column is the same place."""
    found = [np.flatnonzero(program.segment == k) for k in range(int(program.segment.max(initial=-1)) + 1)]
    lengths = [len(nodes) for nodes in found]
    usual = max(set(lengths), key=lengths.count, default=0)
    same = [nodes for nodes in found if len(nodes) == usual]
    return np.array(same, np.int64).reshape(len(same), usual)


def iteration_spread(program: Program, own: np.ndarray) -> np.ndarray:
    """Half the interquartile range of ``own`` over the same place in all iterations of the usual length; else 0.

    Estimates what repeats would show where there are none. The first iteration warms up and is left out if two remain.
    """
    spread = np.zeros(len(own))
    same = places(program)
    if not same.size:
        return spread
    first = np.flatnonzero(program.segment == 0)
    sample = same[1:] if len(same) > 2 and same[0][0] == first[0] else same
    low, high = np.percentile(own[sample], (25, 75), axis=0)
    spread[same] = (high - low) / 2
    return spread


def _align(timing: Timing, columns: list[np.ndarray]) -> list[np.ndarray]:
    """Each row on the leader's clock: the offset holds at the row's first event, the drift counts from there."""
    aligned = []
    for row, times in enumerate(columns):
        known = times != UNKNOWN
        first = timing.host_issue[row].min(initial=np.iinfo(np.int64).max, where=timing.host_issue[row] != UNKNOWN)
        shift = timing.clock_offset[row] + (times - first) * int(timing.clock_drift[row]) // 10**9
        aligned.append(np.where(known, times + shift, UNKNOWN))
    return aligned


def _stand_ins(graph: Graph, measured: list[bool]) -> tuple[np.ndarray, dict[int, list[int]]]:
    """Measured.stand_in and .alike: for every rank itself, or a measured rank with the same program: one with equal values and
    equal places in its groups if there is one, so that a group of clones stands in for a group."""
    stand_in, alike, missing = np.arange(graph.world_size), {}, []
    known, members = np.array(measured, bool), Members(graph)
    for program in np.unique(graph.ranks.program[~known]).tolist():
        ours = graph.ranks.program == program
        able, unmeasured = np.flatnonzero(ours & known), np.flatnonzero(ours & ~known)
        if not len(able):
            missing += unmeasured.tolist()
            continue
        places = members.places(able)
        for rank, place in zip(unmeasured.tolist(), members.places(unmeasured), strict=True):
            same = graph.ranks.values[able] == graph.ranks.values[rank]
            likeness = same * (places.shape[1] + 1) + (places == place).sum(axis=1)
            alike[rank] = able[likeness == likeness.max()].tolist()
            stand_in[rank] = alike[rank][0]
    if missing:
        raise PrismError(
            f"ranks {ranks_text(sorted(missing))} were never measured; run prism-slice for them, or with --cover classes"
        )
    return stand_in, alike
