"""Null predictors: what one would claim without calibration; a benchmark that they pass proves nothing."""

from __future__ import annotations

import numpy as np

from prism_tools.calibrate.durations import from_measurements
from prism_tools.errors import PrismError
from prism_tools.graph.iterations import counted, iteration_times
from prism_tools.graph.model import Graph
from prism_tools.graph.schema import UNKNOWN, Kind


def own_spans_only(graph: Graph) -> float:
    """Iteration time, ns, if nobody waited for anybody: each rank's own compute and communication, mean over ranks."""
    known = graph.durations or from_measurements(graph)
    chosen = counted(graph)
    sums = []
    for rank in range(graph.world_size):
        program = graph.program_of(rank)
        spans = np.isin(program.segment, np.array(chosen)) & np.isin(program.kind, (Kind.COMPUTE, Kind.COMM))
        sums.append(int(known.own[known.row[rank]][spans].sum()) / max(len(chosen), 1))
    return float(np.mean(sums))


def uncalibrated(graph: Graph) -> float:
    """Iteration time, ns, as the slices themselves measured it: the mean over measured ranks and runs.

    PrismError if no iteration was measured.
    """
    timing, chosen = graph.timing, counted(graph)
    means = []
    for row, rank in enumerate(timing.rank.tolist() if timing else []):
        assert timing is not None
        times = iteration_times(graph.program_of(rank), timing.start[row], timing.end[row], chosen)
        if (times != UNKNOWN).any():
            means.append(float(times[times != UNKNOWN].mean()))
    if not means:
        raise PrismError("no iteration was measured; run prism-slice first")
    return float(np.mean(means))
