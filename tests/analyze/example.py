"""A calibrated graph that can be checked by hand: two ranks, the second late in every iteration."""

import numpy as np

from prism_tools.calibrate import calibrate
from prism_tools.graph.model import Memory, Replay
from tests.graph.builder import add_timing, build, comm, compute, step, wait

MS = 1_000_000


def bare(ranks=2, iterations=3):
    """Per iteration: compute, all_reduce, compute, asynchronous all_gather, compute, its wait, compute, step."""

    def nodes(rank):
        listed = []
        for k in range(iterations):
            listed += [compute(), comm("all_reduce", "world", 4000, at="train.py:8 forward"), compute()]
            listed += [comm("all_gather", "world", 400, name=f"g{k}", is_async=True), compute(), wait(f"g{k}")]
            listed += [compute(), step()]
        return listed

    return build(ranks, {"world": list(range(ranks))}, nodes)


def calibrated(iterations=3, late=4):
    """Measured together: 10 ms of compute (rank 1: ``late`` ms more), 2 ms all_reduce, 1 ms, all_gather of 5 ms beside
    3 ms of compute, 1 ms. An iteration lasts 10 + late + 2 + 1 + 5 + 1 ms."""
    graph = bare(iterations=iterations)
    for rank in (0, 1):
        clock, times = 0, []
        for _ in range(iterations):
            arrive = clock + (10 + late * rank) * MS
            meet = clock + (10 + late) * MS
            spans = [(clock, arrive), (arrive, meet + 2 * MS), (meet + 2 * MS, meet + 3 * MS)]
            spans += [(meet + 3 * MS, meet + 8 * MS), (meet + 3 * MS, meet + 6 * MS)]
            spans += [(meet + 6 * MS, meet + 8 * MS), (meet + 8 * MS, meet + 9 * MS), (meet + 9 * MS, meet + 9 * MS)]
            times += [(start, start, start, end) for start, end in spans]
            clock = meet + 9 * MS
        add_timing(graph, {rank: times})
    return calibrate(graph)


def replayed():
    """The same after a replay of four iterations, the third of which was late."""
    graph = calibrated()
    timing = graph.timing
    timing.iteration_ns = [np.array([30, 23.1, 40, 23.3]) * MS, np.array([30, 23.1, 40, 23.3]) * MS]
    graph.replay = Replay(
        timing, np.array([0, 0, 2, 0]), np.array([0, 0, 17 * MS, 0]), np.array([True, True, False, True]), 1, 0
    )
    rss, none = np.array([9_000, 1_900, 1_920]) * 10**6, np.full(3, -1)
    graph.memory = Memory(np.array([0, 1, 0]), rss, none, none, ["slice", "replay", "replay"])
    graph.stage = "replayed"
    return graph
