"""What a replay says of clocks that move apart."""

import numpy as np

from prism_tools.emulate.replay import drifted
from prism_tools.graph.model import Timing

SECOND = 10**9


def rows(drift, error):
    """Two ranks on two machines, for 100 s."""
    zero = np.zeros(2, np.int64)
    times = [np.array([0, 50]) * SECOND, np.array([1, 100]) * SECOND]
    clocks = [zero, np.array([0, drift]), np.array([0, error])]
    return Timing(zero, zero, zero, *clocks, host_issue=times, ready=times, start=times, end=times)


def test_apart():
    assert drifted(rows(-3000, 20_000)) == 99 * 3000 - 40_000  # ns, after 99 s at 3 us a second


def test_no_more_than_is_known_or_matters():
    assert drifted(rows(3000, 150_000)) == 0 and drifted(rows(400, 0)) == 0
