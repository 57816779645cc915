"""From sliced to calibrated: one globally consistent timeline (arrays in, arrays out; no torch, no files)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from prism_tools.calibrate.durations import from_measurements
from prism_tools.calibrate.schedule import timeline
from prism_tools.calibrate.steady import steady_state
from prism_tools.graph.check import refuse_backwards
from prism_tools.graph.classes import Classes, classes_of
from prism_tools.graph.match import find_matches
from prism_tools.graph.model import Durations, Graph
from prism_tools.graph.order import dependencies

LANES = 16  # ranks a class from which on lockstep is faster than solving each by itself


def calibrate(graph: Graph) -> Graph:
    """``graph`` with durations, timeline and steady state, at stage "calibrated".

    A graph that was never measured but has durations is solved with these. PrismError if there is neither for some
    rank, a measured clock went backwards, or the graph has no consistent order.
    """
    refuse_backwards(graph)
    known = from_measurements(graph) if graph.timing or not graph.durations else graph.durations
    matches = find_matches(graph, classes=_classes(graph, known))
    order = dependencies(graph, matches)
    solved = timeline(graph, matches, order, known)
    steady = steady_state(graph, matches, order, known)
    return replace(graph, stage="calibrated", durations=known, timeline=solved, steady=steady)


def _classes(graph: Graph, known: Durations) -> Classes:
    """Ranks that take equally long; or, where these are still many, all that do the same."""
    exact = classes_of(graph, known.row)
    if len(exact) < LANES * len(graph.programs):
        return exact
    alike = classes_of(graph, np.zeros(graph.world_size, np.int64))
    return alike if len(exact) >= LANES * len(alike) else exact
