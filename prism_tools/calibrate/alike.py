"""Which ranks take equally long as far as their measurements, or those of who stands for them, can tell."""

from __future__ import annotations

import numpy as np

from prism_tools.calibrate.measured import Measured
from prism_tools.graph.members import Members
from prism_tools.graph.model import Graph, Probes
from prism_tools.graph.schema import P2P


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
