"""From sliced to calibrated: one globally consistent timeline (arrays in, arrays out; no torch, no files)."""

from __future__ import annotations

from dataclasses import replace

from prism_tools.calibrate.durations import durations
from prism_tools.calibrate.schedule import timeline
from prism_tools.calibrate.steady import steady_state
from prism_tools.graph.match import find_matches
from prism_tools.graph.model import Graph
from prism_tools.graph.order import dependency_order


def calibrate(graph: Graph) -> Graph:
    """``graph`` with durations, timeline and steady state, at stage "calibrated".

    PrismError if ranks were never measured, or the graph has no consistent order.
    """
    matches = find_matches(graph)
    order = dependency_order(graph, matches)
    known = durations(graph, matches)
    solved = timeline(graph, matches, order, known)
    steady = steady_state(graph, matches, order, known)
    return replace(graph, stage="calibrated", durations=known, timeline=solved, steady=steady)
