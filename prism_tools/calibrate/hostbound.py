"""Spans of a stream that ended because the host had issued no more: they show the host's pace, not the device's work."""

from __future__ import annotations

import numpy as np

from prism_tools.calibrate.measured import places
from prism_tools.graph.model import Program
from prism_tools.graph.schema import HOST_LANE, Kind

AT_ONCE = 8_000  # ns: a point that is reached sooner after it was issued found the stream idle (measured: 0 to 6 µs)


def host_bound(program: Program, own: np.ndarray, behind: list[np.ndarray]) -> np.ndarray:
    """Put the device's own time in place of what host-bound spans took; returns the doubt that is left, float[n], ns.

    ``own``: float[runs, n], changed; ``behind[run]``: how long after its issue each node's end was reached. Where the
    stream was behind the host at the same place in another iteration (prism-record lets the host get ahead in one), the
    span takes what it took there, if that is less. Elsewhere it is between nothing and what was shown: the middle, in doubt.
    """
    on_stream = (program.kind == Kind.COMPUTE) & (program.lane != HOST_LANE)
    bound = on_stream & (np.array(behind) < AT_ONCE)
    doubt = np.zeros(own.shape[1])
    if not bound.any():
        return doubt
    known = np.full(own.shape[1], np.nan)
    same = places(program)
    if same.size:
        sample = np.where(bound, np.nan, own)[:, same].reshape(-1, same.shape[1])  # [runs * iterations, places]
        seen = ~np.isnan(sample).all(axis=0)
        known[same[:, seen]] = np.nanmedian(sample[:, seen], axis=0)
    unknown = bound & np.isnan(known)
    doubt[unknown.any(axis=0)] = np.where(unknown, own, 0).max(axis=0)[unknown.any(axis=0)] / 2
    own[unknown] /= 2
    taken = bound & ~np.isnan(known)
    own[taken] = np.minimum(own, known)[taken]
    return doubt
