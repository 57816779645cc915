"""What a measured node took for itself, after everything that the graph says it waited for."""

from __future__ import annotations

import numpy as np

from prism_tools.graph.model import Program
from prism_tools.graph.schema import UNKNOWN, Kind


def own_times(program: Program, start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """What each COMPUTE, WAIT and MARK node took after all it waits for, float64 ns; NaN: unknown, or a COMM node."""
    begin = start.copy()
    source, target = program.edges[:, 0], program.edges[:, 1]
    waits = np.isin(program.kind[target], (Kind.WAIT, Kind.MARK))
    np.maximum.at(begin, target[waits], end[source[waits]])
    own = np.maximum(end - begin, 0).astype(float)
    own[(program.kind == Kind.COMM) | (start == UNKNOWN) | (end == UNKNOWN)] = np.nan
    return own
