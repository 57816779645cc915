"""Re-alignment: only what was measured anew changes, and only of the same program."""

from dataclasses import replace

import numpy as np
import pytest

from prism_tools.calibrate import calibrate
from prism_tools.calibrate.planning import Change, plan
from prism_tools.calibrate.realign import realign
from prism_tools.calibrate.selectors import parse_selector
from prism_tools.errors import PrismError
from prism_tools.graph.check import check
from prism_tools.graph.model import Memory, Probes
from prism_tools.graph.schema import Kind, Op, Reduce, Source
from tests.graph.builder import add_timing, build, comm, compute, differences, step, wait

ITERATIONS = 3


def train(ranks=2, size=64, op="all_reduce", groups=None, at="train.py:5 forward", more=0):
    groups = groups or {"world": list(range(ranks))}
    middle = [compute()] * (1 + more)
    return build(ranks, groups, lambda rank: [compute(), comm(op, "world", size, at=at), *middle, step()] * ITERATIONS)


def measured(graph, ranks, before, communication, slice_id=0):
    """Each of ``ranks`` takes ``before[rank]`` ns, reduces for ``communication`` after the last of them, then 3 ns."""
    last = max(before[rank] for rank in ranks)
    for rank in ranks:
        clock, times = 0, []
        for _ in range(ITERATIONS):
            arrive, end = clock + before[rank], clock + last + communication
            times += [(clock, clock, clock, arrive), (arrive, arrive, arrive, end), (end, end, end, end + 3)]
            times.append((end + 3,) * 4)
            clock = end + 3
        add_timing(graph, {rank: times}, slice_id)
    return graph


def alone(graph, before, communication=10):
    """Ranks measured in slices of their own: our own data plane answers."""
    for rank in before:
        measured(graph, [rank], before, communication, slice_id=rank)
    return graph


def probes(duration, size=64):
    row = {"op": Op.ALL_REDUCE, "dtype": 0, "reduce": Reduce.SUM, "size": 2, "bytes": size, "duration": duration}
    types = {"op": np.uint8, "dtype": np.int16, "reduce": np.uint8, "size": np.int32}
    columns = {name: np.array([value], types.get(name, np.int64)) for name, value in row.items()}
    return Probes(**columns, spread=np.zeros(1, np.int64), repeats=np.ones(1, np.int32), tails=[np.zeros(2, np.int64)],
                  issue=[np.zeros(2, np.int64)])  # fmt: skip


def own(graph):
    """Of each rank the first iteration's durations: span, match, span."""
    return [graph.durations.own[row].tolist()[:3] for row in graph.durations.row]


def sources(graph):
    return [graph.durations.source[row].tolist()[1] for row in graph.durations.row]


def test_one_rank_anew_changes_its_spans_alone():
    old = calibrate(alone(train(), {0: 100, 1: 120}))
    new = alone(train(at="train.py:6 forward"), {0: 60})  # an edited file: lines may move
    graph, gain = realign(old, new, "new.h5")
    assert own(old) == [[100, 10, 3], [120, 10, 3]]
    assert own(graph) == [[60, 10, 3], [120, 10, 3]] and sources(graph) == [Source.EMULATED] * 2
    assert (gain.before, gain.after) == (133, 133), "rank 1 was last, and is"
    assert [part[:3] for part in gain.parts] == [("ranks 0 measured anew in new.h5", 0, 9)], "its spans and steps"
    assert graph.timing.rank.tolist() == [1, 0] and check(graph) == []
    graph, gain = realign(graph, alone(train(), {1: 40}), "new.h5")
    assert own(graph) == [[60, 10, 3], [40, 10, 3]] and (gain.before, gain.after) == (133, 73)


def test_everything_anew_is_a_calibration_from_scratch():
    old = calibrate(alone(train(), {0: 100, 1: 120}))
    fresh = calibrate(measured(train(), [0, 1], {0: 60, 1: 50}, 7))
    graph, _ = realign(old, measured(train(), [0, 1], {0: 60, 1: 50}, 7), "new.h5")
    assert differences(graph.durations, fresh.durations) == [] and sources(graph) == [Source.REAL] * 2
    assert differences(graph.timeline, fresh.timeline) == [] and differences(graph.steady, fresh.steady) == []


def test_a_lesser_source_never_replaces_a_better_one():
    old = calibrate(measured(train(), [0, 1], {0: 100, 1: 120}, 7))
    graph, _ = realign(old, alone(train(), {0: 60, 1: 50}, 33), "new.h5")
    assert own(graph) == [[60, 7, 3], [50, 7, 3]] and sources(graph) == [Source.REAL] * 2
    new = alone(train(), {0: 60, 1: 50}, 33)
    new.probes = probes(4)
    assert own(realign(old, new, "new.h5")[0]) == [[60, 7, 3], [50, 7, 3]]


def test_probes_anew_replace_probes_and_what_is_emulated():
    known = alone(train(), {0: 100, 1: 120})
    new = alone(train(), {0: 60})
    new.probes = probes(4)
    graph, _ = realign(calibrate(known), new, "new.h5")
    assert own(graph) == [[60, 4, 3], [120, 4, 3]] and sources(graph) == [Source.PROBE] * 2
    known.probes = probes(9)
    graph, _ = realign(calibrate(known), new, "new.h5")
    assert own(graph) == [[60, 4, 3], [120, 4, 3]] and graph.probes.duration.tolist() == [4]
    new.probes = probes(4, size=65)  # of another size: the exact one stays
    graph, _ = realign(calibrate(known), new, "new.h5")
    assert own(graph) == [[60, 9, 3], [120, 9, 3]] and graph.probes.duration.tolist() == [9, 4]


def test_old_files_without_iteration_times():
    old = calibrate(alone(train(), {0: 100, 1: 120}))
    old.timing.iteration_ns = []
    graph, _ = realign(old, alone(train(), {0: 60}), "new.h5")
    assert graph.timing.iteration_ns == [] and len(graph.timing.start) == 2


def test_stand_ins_follow_their_rank():
    groups = {"world": [0, 1], "other": [2, 3]}
    graph = build(4, groups, lambda rank: [compute(), comm("all_reduce", "other" if rank > 1 else "world", 64), compute(),
                                           step()] * ITERATIONS)  # fmt: skip
    old = calibrate(measured(graph, [0, 1], {0: 100, 1: 120}, 7))
    new = replace_timing(graph, [0, 1], {0: 60, 1: 50}, 5)
    assert own(realign(old, new, "new.h5")[0]) == [[60, 5, 3], [50, 5, 3]] * 2
    new = replace_timing(graph, [1], {1: 50}, 5)
    assert own(realign(old, new, "new.h5")[0]) == [[100, 7, 3], [50, 7, 3]] * 2


def replace_timing(graph, ranks, before, communication):
    return measured(replace(graph, timing=None), ranks, before, communication)


def test_plans_stay_where_nothing_was_measured():
    old = calibrate(alone(train(), {0: 100, 1: 120}))
    old, _ = plan(old, [Change("set", parse_selector("0-1"), 77, "")])
    graph, _ = realign(old, alone(train(), {0: 60}), "new.h5")
    assert own(graph) == [[60, 10, 3], [77, 10, 77]]
    spans = graph.program_of(1).kind == Kind.COMPUTE
    assert set(graph.durations.source[graph.durations.row[1]][spans].tolist()) == {Source.PLANNED}


@pytest.mark.parametrize(
    "other, text",
    [
        (train(3), "a program of 3 ranks, not 2; record it with as many"),
        (
            train(op="all_gather"),
            "another program: rank 0 differs at operation 0: all_gather 64 B on gloo 0-1 (train.py:5 forward) there, "
            "all_reduce 64 B on gloo 0-1 (train.py:5 forward) here; record and slice it from the beginning",
        ),
        (
            train(size=65),
            "rank 0 differs at operation 0: all_reduce 65 B on gloo 0-1 (train.py:5 forward) there, all_reduce 64 B",
        ),
        (
            train(more=1),
            "rank 0 differs at operation 1: optimizer_step (train.py:9 step) there, optimizer_step (train.py:9",
        ),
        (
            train(groups={"world": [1, 0]}),
            "rank 0 differs at operation 0: all_reduce 64 B on gloo 1,0 (train.py:5 forward) there",
        ),
    ],
)
def test_another_program_is_refused(other, text):
    with pytest.raises(PrismError) as error:
        realign(calibrate(alone(train(), {0: 100, 1: 120})), other, "new.h5")
    assert str(error.value).startswith("new.h5: ") and text in str(error.value)


def test_edges_belong_to_the_program():
    def nodes(waits):
        return [
            compute(),
            comm("all_reduce", "world", 64, name="a", is_async=True),
            compute(),
            wait(*waits),
            compute(),
            step(),
        ]

    old, new = (build(1, {"world": [0]}, lambda rank, waits=waits: nodes(waits)) for waits in (["a"], []))
    add_timing(old, {0: [(k, k, k, k) for k in range(6)]})
    with pytest.raises(PrismError, match=r"rank 0 differs at operation 1: wait \(train.py:2 wait\) there, wait"):
        realign(calibrate(old), new, "new.h5")


def test_who_meets_whom_belongs_to_the_program():
    """Rank 1 receives two messages, in the order of their tags or in the other."""

    def job(*tags):
        def nodes(rank):
            mine = [
                comm("recv" if rank else "send", "world", 64, peer=1 - rank, tag=tag) for tag in tags[2 * rank :][:2]
            ]
            return [compute(), mine[0], compute(), mine[1], step()]

        graph = build(2, {"world": [0, 1]}, nodes)
        add_timing(graph, {rank: [(k, k, k, k + 1) for k in range(5)] for rank in range(2)})
        return graph

    realign(calibrate(job(1, 2, 1, 2)), job(3, 4, 3, 4), "new.h5")
    with pytest.raises(PrismError) as error:
        realign(calibrate(job(1, 2, 1, 2)), job(1, 2, 2, 1), "new.h5")
    assert str(error.value) == (
        "new.h5: another program: rank 1 differs at operation 0: it meets rank 0's operation 1 there, it meets rank 0's "
        "operation 0 here; record and slice it from the beginning"
    )
    with pytest.raises(
        PrismError, match="^new.h5: rank 1 recv from rank 0 on world, node 1 .*: rank 0 has no send for it "
    ):
        realign(calibrate(job(1, 2, 1, 2)), job(3, 2, 1, 2), "new.h5")


def test_peaks_of_what_was_measured_anew_are_new():
    def with_peaks(graph, ranks, peak):
        rss = np.array(ranks) * 10 + peak
        graph.memory = Memory(np.array(ranks, np.int32), rss, rss * 0 - 1, rss * 0 - 1, ["slice"] * len(ranks))
        return graph

    old = calibrate(with_peaks(alone(train(), {0: 100, 1: 120}), [0, 1], 500))
    new = with_peaks(alone(train(), {1: 60}), [1], 700)
    memory = realign(old, new, "new.h5")[0].memory
    assert (memory.rank.tolist(), memory.rss.tolist(), memory.stage) == ([0, 1], [500, 710], ["slice"] * 2)
    assert realign(old, alone(train(), {1: 60}), "new.h5")[0].memory.rss.tolist() == [500, 510]


def test_what_is_missing_is_said():
    with pytest.raises(
        PrismError, match="not calibrated yet, so there is nothing to re-align; run prism-calibrate first"
    ):
        realign(alone(train(), {0: 1, 1: 1}), train(), "new.h5")
    with pytest.raises(PrismError, match="new.h5: nothing was measured; run prism-slice first"):
        realign(calibrate(alone(train(), {0: 1, 1: 1})), train(), "new.h5")
