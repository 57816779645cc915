"""What a replay's traces say."""

from types import SimpleNamespace

import numpy as np

from prism_tools.emulate.replay import measured
from prism_tools.graph.match import find_matches
from tests.graph.builder import build, compute, step


def test_a_rank_that_has_more_iterations_than_others():
    """As under DistributedDataParallel.join: what is late in those iterations is late in none that all ranks have."""
    graph = build(2, {"w": [0]}, lambda rank: [compute(), step()] * (2 + rank))
    ends = 10**6 * np.arange(1, 7)
    trace = {"times": np.stack([ends] * 4, 1), "clock": SimpleNamespace(offset=0, drift=0, error=0)}
    found = measured(graph, find_matches(graph), [1], {1: trace | {"late": [(2, 10**6), (4, 10**6)]}})
    assert found.late.tolist() == [0, 1] and found.late_ns.tolist() == [0, 10**6]
