"""Noisy slices: whose runs differ so much that the median of them cannot be trusted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from prism_tools.graph.iterations import counted
from prism_tools.graph.model import Graph
from prism_tools.graph.names import ranks_text
from prism_tools.graph.own import own_times

# Half the interquartile range of a rank's own time, relative to its median. A rank on the critical path whose own time is
# this uncertain can by itself take the iteration time past the goal for its largest error, 1 % (design §12); runs on a
# quiet machine differ by about 1 % from one to the next: half of the range of the inner half is less (not measured as such).
NOISY = 0.01
SHOWN = 5  # slices named one by one


def own_per_iteration(graph: Graph) -> Iterator[tuple[int, np.ndarray]]:
    """(rank, own time of each of its runs, float64 ns per counted iteration), by rank; communication is not counted in.

    Without iterations: of the whole program.
    """
    timing, chosen = graph.timing, counted(graph)
    assert timing is not None
    for rank in np.unique(timing.rank).tolist():
        program = graph.program_of(rank)
        nodes = np.isin(program.segment, np.array(chosen)) if len(chosen) else np.ones(len(program), bool)
        rows = np.flatnonzero(timing.rank == rank).tolist()
        sums = [np.nansum(own_times(program, timing.start[row], timing.end[row])[nodes]) for row in rows]
        yield rank, np.array(sums) / max(len(chosen), 1)


def spreads(graph: Graph) -> dict[int, tuple[float, int]]:
    """Rank -> half the interquartile range of its own time over its runs, relative to the median, and how many these are;
    only ranks that ran more than once."""
    found = {}
    for rank, runs in own_per_iteration(graph):
        low, middle, high = np.percentile(runs, (25, 50, 75))
        if len(runs) > 1 and middle > 0:
            found[rank] = float((high - low) / 2 / middle), len(runs)
    return found


def warn_of_noise(graph: Graph, todo: list[tuple[int, list[int]]], progress: Any, timed: bool) -> None:
    """Name the slices with a rank whose spread is above NOISY, the worst first, and what the others' is.

    ``timed``: virtual peers kept solved times, as they must when a slice is measured again.
    """
    how = " of the calibrated graph, and --realign that with it" if timed else ""
    known = spreads(graph)
    worst = []  # spread, slice's place in todo, the rank that shows it
    for place, (_, sandbox) in enumerate(todo):
        shown = [(known[rank][0], place, rank) for rank in sandbox if rank in known]
        worst += [max(shown)] if shown else []
    noisy = sorted((row for row in worst if row[0] > NOISY), reverse=True)
    calm = sorted(spread for spread, *_ in worst if spread <= NOISY)
    others = f" (others: ± {100 * calm[len(calm) // 2]:.1f} %)" if calm else ""
    for spread, place, rank in noisy[:SHOWN]:
        number, sandbox = todo[place]
        which = ranks_text(set(sandbox))
        differs = f"rank {rank}'s own time differs by ± {100 * spread:.1f} % between {known[rank][1]} runs{others}"
        progress.warn(f"slice {number} (ranks {which}) is noisy: {differs}; measure it again with --ranks {which}{how}")
    if len(noisy) > SHOWN:
        progress.warn(f"{len(noisy) - SHOWN} more slices are noisy, by less")
