"""From measured slices to one timeline: iteration time, its interval, the critical path, and the null predictors."""

import numpy as np
import pytest

from prism_tools.calibrate import calibrate
from prism_tools.calibrate.nulls import own_spans_only, uncalibrated
from prism_tools.calibrate.schedule import _disagreement
from prism_tools.errors import PrismError
from prism_tools.graph.iterations import counted, iteration_times, last_nodes
from prism_tools.graph.model import Probes
from prism_tools.graph.schema import UNKNOWN, Op, Reduce
from tests.graph.builder import add_timing, build, comm, compute, step


def train(iterations=3):
    def nodes(rank):
        return [compute(), comm("all_reduce", "world", 64), compute(), step()] * iterations

    return build(2, {"world": [0, 1]}, nodes)


def run(graph, rank, spans, communication=10, slice_id=0, epoch=0):
    """Rank's measured row: per iteration (compute before, compute after); the reduction takes ``communication``."""
    clock, times = epoch, []
    for before, after in spans:
        for length in (before, communication, after, 0):
            times.append((clock, clock, clock, clock + length))
            clock += length
    add_timing(graph, {rank: times}, slice_id)


def sliced():
    """Each rank measured alone: the reduction is emulated and takes 10 ns; rank 1 is 20 ns late in every iteration."""
    graph = train()
    run(graph, 0, [(100, 5), (100, 5), (104, 5)], slice_id=0)
    run(graph, 1, [(120, 5), (120, 5), (124, 5)], slice_id=1, epoch=77_000)
    return graph


def test_slices_become_one_timeline():
    graph = sliced()
    solved = calibrate(graph)
    assert (graph.stage, graph.timeline) == ("bare", None), "the input is left alone"
    assert solved.stage == "calibrated"
    timeline = solved.timeline
    assert [timeline.end[row].tolist()[:4] for row in timeline.row] == [[100, 130, 135, 135], [120, 130, 135, 135]]
    assert timeline.iteration_ns.tolist() == [135, 139]
    assert timeline.iteration_time_ns == 137
    first = [(1, 4), (1, 5), (1, 6), (1, 7)]
    assert [tuple(node) for node in timeline.critical] in (
        [*first, (1, 8), (1, 9), (1, 10), (1, 11)],
        [*first, (1, 8), (1, 9), (0, 9), (0, 10), (0, 11)],
    )


def test_the_interval_combines_iterations_path_and_runs():
    graph = train()
    run(graph, 0, [(100, 0)] * 3, communication=0)
    run(graph, 1, [(50, 0)] * 3, communication=0)
    assert calibrate(graph).timeline.interval_ns == 0
    run(graph, 0, [(100, 0), (140, 0), (140, 0)], communication=0)
    solved = calibrate(graph).timeline
    assert solved.iteration_ns.tolist() == [120, 120]
    path = np.hypot(10, 10) / 2  # half of the interquartile range, 20, of two spans, over two iterations
    runs = 20  # half of 40 per iteration
    assert solved.interval_ns == round(np.hypot(path, runs))
    between = calibrate(sliced()).timeline  # 135 and 139: two standard errors are 2 * sqrt(8) / sqrt(2)
    spread = np.sqrt(2 * 1**2) / 2  # the spans before the reduction: 120, 120, 124 without the first
    assert between.interval_ns == round(np.hypot(4, spread))


def test_those_that_stand_for_a_rank_may_disagree():
    """Rank 1 may be like rank 0 or like rank 2, whose iterations take 20 longer: half of that, each time."""
    graph = build(3, {"world": [0, 1, 2]}, lambda rank: [compute(), comm("barrier", "world"), step()] * 3)
    for rank, span in ((0, 100), (2, 120)):
        run = [[(k, k, k, k + span), *[(k + 150, k + 150, k + 150, k + 200)] * 2] for k in (0, 200, 400)]
        add_timing(graph, {rank: sum(run, [])}, rank)
    assert _disagreement(graph, [0, 2]) == 0, "measured once"
    assert _disagreement(graph, [0, 1, 2]) == 10


def test_what_was_fitted_is_wrong_by_the_same_each_time():
    """A probe of half the bytes: its 10 ns are in doubt by 3 and by half, in both iterations alike."""
    graph, none = sliced(), [np.zeros(2, np.int64)]
    columns = (Op.ALL_REDUCE, 0, Reduce.SUM, 2, 32, 10, 3, 5)
    graph.probes = Probes(*(np.array([value]) for value in columns), none, none)
    solved = calibrate(graph).timeline
    assert solved.iteration_ns.tolist() == [135, 139]
    assert solved.interval_ns == round(np.hypot(4, np.hypot(np.sqrt(2 + 2 * 3**2), 5 + 5) / 2))


def test_iterations_end_with_their_last_step_and_the_first_never_counts():
    graph = train(4)
    program = graph.program_of(0)
    assert last_nodes(program).tolist() == [3, 7, 11, 15]
    assert counted(graph) == range(1, 4)
    graph.launch.warmup = 2
    assert counted(graph) == range(2, 4)
    graph.launch.warmup = 9
    assert counted(graph) == range(3, 4)
    end = np.arange(16) * 10
    assert iteration_times(program, end, end, range(4)).tolist() == [30, 40, 40, 40]
    end[7] = UNKNOWN
    assert iteration_times(program, end, end, range(4)).tolist() == [30, UNKNOWN, UNKNOWN, 40]


def test_a_program_without_iterations_has_a_timeline_but_no_iteration_time():
    graph = build(1, {"world": [0]}, lambda rank: [compute(), comm("barrier", "world"), compute()])
    add_timing(graph, {0: [(0, 0, 0, 5), (5, 5, 5, 9), (9, 9, 9, 10)]})
    timeline = calibrate(graph).timeline
    assert timeline.iteration_time_ns == UNKNOWN and timeline.interval_ns == UNKNOWN and not len(timeline.iteration_ns)
    assert timeline.critical.tolist() == [[0, 0], [0, 1], [0, 2]] and timeline.end[0].tolist() == [5, 9, 10]


def test_null_predictors_miss_the_waiting():
    graph = sliced()
    assert own_spans_only(graph) == np.mean([100 + 104, 120 + 124]) / 2 + 15
    assert uncalibrated(graph) == np.mean([115, 119, 135, 139])
    assert own_spans_only(calibrate(graph)) == own_spans_only(graph)
    with pytest.raises(PrismError, match="no iteration was measured"):
        uncalibrated(train())
