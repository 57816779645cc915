"""prism-calibrate on files that cannot be solved: one line that names what is wrong, and no output."""

import numpy as np
import pytest

from prism_tools.graph import file
from tests import tools
from tests.bench import clusters
from tests.calibrate.test_planning import backlog
from tests.graph.builder import add_timing, build, comm, compute, step


def backwards():
    graph = build(1, {"w": [0]}, lambda rank: [compute(), compute(), step()])
    add_timing(graph, {0: [(0, 0, 0, 9), (9, 9, 9, 4), (9, 9, 9, 9)]})
    return graph


def unmeasured():
    graph = build(2, {"w": [0, 1]}, lambda rank: [compute()] * (1 + rank) + [comm("barrier", "w")])
    add_timing(graph, {0: [(0, 0, 0, 1), (1, 1, 1, 2)]})
    return graph


def with_durations(nodes):
    graph = build(2, {"w": [0, 1]}, nodes)
    graph.durations = clusters.durations(graph, np.arange(2))
    return graph


def circle():
    order = [["send", "recv"], ["send", "recv"]]
    return with_durations(lambda rank: [comm(op, "w", 8, peer=1 - rank, at=f"ring.py:{rank} go") for op in order[rank]])


def unmatched():
    return with_durations(lambda rank: [comm("send", "w", 8, peer=1, at="p.py:3 f")] if rank == 0 else [compute()])


BAD = {
    circle: "operations wait for each other: rank 0 send on w (ring.py:0 go) waits for rank 1; rank 1 send on w "
    "(ring.py:1 go) waits for rank 0; ",
    unmatched: "rank 0 send to rank 1 on w, node 0 (p.py:3 f): rank 1 has no receive for it; ",
    unmeasured: "ranks 1 were never measured; ",
    backwards: "timing row 0: rank 0 compute (node 1) ends before it starts, or starts before 0; a clock went backwards, ",
    lambda: build(1, {}, lambda rank: [compute()]): "no rank was ever measured; ",
}


@pytest.mark.parametrize("graph", BAD)
def test_what_cannot_be_solved_is_one_line(graph, tmp_path):
    file.write(graph(), tmp_path / "in.h5")
    error = tools.run("calibrate", "in.h5", "-o", "out.h5", cwd=tmp_path, expect=1).stderr
    assert error.startswith(f"prism-calibrate: {BAD[graph]}") and error.count("\n") == 1
    assert not (tmp_path / "out.h5").exists()


def test_a_clock_that_went_backwards_is_refused_on_every_way(tmp_path):
    file.write(backwards(), tmp_path / "in.h5")
    good = backwards()
    good.timing.end[0][1] = 9
    file.write(good, tmp_path / "good.h5")
    tools.run("calibrate", "good.h5", "-o", "known.h5", cwd=tmp_path)
    for argv, name in ((["in.h5", "--delay", "0=1ms"], ""), (["known.h5", "--realign", "in.h5"], "in.h5: ")):
        error = tools.run("calibrate", *argv, "-o", "out.h5", cwd=tmp_path, expect=1).stderr
        assert error.startswith(f"prism-calibrate: {name}{BAD[backwards]}") and error.count("\n") == 1
    assert not (tmp_path / "out.h5").exists()


@pytest.mark.parametrize("cover, warned", [("all", True), ("classes", False)])
def test_ranks_that_others_stand_in_for_are_named(cover, warned, tmp_path):
    graph = build(4, {f"w{k}": [k] for k in range(4)}, lambda rank: [compute(), comm("barrier", f"w{rank}")])
    add_timing(graph, {rank: [(0, 0, 0, 5), (5, 5, 5, 7)] for rank in (0, 2)})
    graph.environment = {"slice": {"cover": cover}}
    file.write(graph, tmp_path / "in.h5")
    said = tools.run("calibrate", "in.h5", "-o", "out.h5", cwd=tmp_path).stderr
    told = (
        "ranks 1,3 were never measured, others of their programs stand in for them; measure them, or slice with --cover"
    )
    assert said == (f"prism-calibrate: warning: {told} classes\n" if warned else "")


def test_standard_input_is_one_graph(tmp_path):
    error = tools.run("calibrate", "--realign", "-", "-o", "out.h5", cwd=tmp_path, expect=2).stderr
    assert error == "prism-calibrate: --realign -: standard input cannot be both graphs; name one of them\n"


def test_durations_without_measurements_are_solved(tmp_path):
    graph = clusters.build(clusters.Cluster())
    graph.durations = clusters.durations(graph, np.arange(graph.world_size))
    file.write(graph, tmp_path / "in.h5")
    tools.run("calibrate", "in.h5", "-o", "out.h5", cwd=tmp_path)
    solved = file.read(tmp_path / "out.h5")
    assert solved.stage == "calibrated" and solved.timeline.iteration_time_ns > 0
    done = tools.run("calibrate", "in.h5", "--scale", "0-1=1", "-o", "planned.h5", cwd=tmp_path)
    assert "(+0.0" in done.stderr.splitlines()[0]


def test_iterations_that_live_on_a_slow_warm_up_are_warned_of(tmp_path):
    file.write(backlog(), tmp_path / "a.h5")
    what = "an iteration that is repeated for ever takes 20.00 ms, those that count 15.00"
    done = tools.run("calibrate", "a.h5", "-o", "b.h5", cwd=tmp_path)
    remedy = "they live on a slower warm-up; record more iterations, with more --warmup"
    assert done.stderr == f"prism-calibrate: warning: {what}: {remedy}\n"
