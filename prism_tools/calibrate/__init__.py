"""From sliced to calibrated: one globally consistent timeline (arrays in, arrays out; no torch, no files)."""

from __future__ import annotations

from dataclasses import replace

from prism_tools.calibrate.durations import durations
from prism_tools.calibrate.schedule import timeline
from prism_tools.graph.classes import classes_of
from prism_tools.graph.match import find_matches
from prism_tools.graph.model import Graph
from prism_tools.graph.order import dependency_order


def calibrate(graph: Graph) -> Graph:
    """``graph`` with durations and timeline, at stage "calibrated".

    A graph that was never measured but has durations is solved with these. PrismError if there is neither for some
    rank, or the graph has no consistent order.
    """
    known = durations(graph, find_matches(graph)) if graph.timing or not graph.durations else graph.durations
    matches = find_matches(graph, classes=classes_of(graph, known.row))
    solved = timeline(graph, matches, dependency_order(graph, matches), known)
    return replace(graph, stage="calibrated", durations=known, timeline=solved)
