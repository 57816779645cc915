"""Slices at solved times, and slices whose runs differ."""

import argparse
import io
import itertools
import re
from dataclasses import replace

import numpy as np
import pytest

from prism_tools.calibrate import calibrate
from prism_tools.cli.progress import Progress
from prism_tools.graph import file
from prism_tools.graph.check import check
from prism_tools.graph.match import find_matches
from prism_tools.graph.model import Memory
from prism_tools.slicing.kept import Kept, Part
from prism_tools.slicing.measuring import Job
from prism_tools.slicing.noise import spreads, warn_of_noise
from prism_tools.slicing.passes import run_passes
from tests.graph.builder import add_timing, build, comm, compute, step
from tests.tools import program, run

LATE = 100_000_000  # ns by which rank 1 is late


@pytest.fixture(scope="module")
def twice(stages, tmp_path_factory):
    """A graph of two passes, and what the tool said."""
    folder = tmp_path_factory.mktemp("passes")
    bare = stages.recorded("uneven.py", world=2)
    done = run("slice", bare.path, "-s", 1, "--passes", 2, "-o", "sliced.h5", cwd=folder)
    assert [path.name for path in folder.iterdir()] == ["sliced.h5"]
    return file.read(folder / "sliced.h5"), done.stderr


def test_virtual_peers_keep_the_solved_times(twice):
    """Rank 0, which is never late itself, waits for rank 1, which is not there."""
    graph, said = twice
    assert check(graph) == [] and graph.timing.rank.tolist() == [0, 1] and graph.timing.slice.tolist() == [0, 1]
    assert np.median(graph.timing.iteration_ns[0][1:]) > 0.5 * LATE  # what one delivery is late the next is early
    one, two = graph.environment["slice"]["passes"]
    assert one["moved"] is None and min(one["iteration_ns"], two["iteration_ns"]) > LATE
    assert two["moved"] == two["iteration_ns"] / one["iteration_ns"] - 1
    assert calibrate(graph).timeline.iteration_time_ns == two["iteration_ns"]
    lines = said.splitlines()
    passes = [line for line in lines if re.match(r"prism-slice: pass \d: iteration ", line)]
    assert len(passes) == 2 and f"({100 * two['moved']:+.2f} %); own spans " in passes[1]
    assert any("warning: the iteration time moved" in line for line in lines) == (abs(two["moved"]) >= 0.001)


def test_a_calibrated_graph_is_sliced_at_its_times(twice, tmp_path):
    solved = calibrate(twice[0])
    file.write(solved, tmp_path / "calibrated.h5")
    argv = ["calibrated.h5", "-s", 1, "--index", 0, "--no-probe", "-o", "part.h5"]
    run("slice", "run", *argv, cwd=tmp_path)
    part = file.read(tmp_path / "part.h5")
    assert part.timing.rank.tolist() == [0] and part.stage == "sliced"
    assert part.durations is part.timeline is part.steady is None
    assert np.median(part.timing.iteration_ns[0][1:]) > 0.5 * LATE


def test_slices_that_did_not_wait_are_not_joined_with_those_that_did(twice, stages, tmp_path):
    bare = stages.recorded("uneven.py", world=2)
    run("slice", "run", bare.path, "-s", 1, "--index", 1, "--no-probe", "-o", "at-once.h5", cwd=tmp_path)
    file.write(twice[0], tmp_path / "in-time.h5")
    for names in itertools.permutations(("at-once.h5", "in-time.h5")):
        done = run("slice", "merge", *names, "-o", "merged.h5", cwd=tmp_path, expect=1)
        what = "its virtual ranks answered at once, those of in-time.h5 at solved times"
        assert done.stderr == f"prism-slice: at-once.h5: {what}; merge slices of one graph and pass\n"
    done = run("slice", "in-time.h5", "-s", 1, "--ranks", 1, "-o", "more.h5", cwd=tmp_path, expect=1)
    what = "virtual ranks answered at solved times in its slices, and would answer at once in more of them"
    assert done.stderr == f"prism-slice: in-time.h5: {what}; slice the calibrated graph, or the bare one\n"
    assert sorted(path.name for path in tmp_path.glob("m*")) == []


def alone():
    return build(1, {"world": [0]}, lambda rank: [compute(), comm("barrier", "world"), step()] * 3)


def asked(folder, most, said):
    """Options of prism-slice run --passes ``most``."""
    return argparse.Namespace(
        file=str(folder / "bare.h5"), repeat=1, passes=most, parallel=1, tool="prism-slice", argv=["prism-slice"],
        progress=Progress("prism-slice", said), output="x.h5", verbose=0,
    )  # fmt: skip


def measured(bare, length):
    """``bare`` with one slice, of its only rank, whose iterations take ``length`` ns each."""
    graph, rows = replace(bare, stage="sliced"), []
    for end in range(length, 4 * length, length):
        start, arrival = end - length, end - 5
        rows += [(start,) * 3 + (arrival,), (arrival,) * 3 + (end,), (end,) * 4]
    add_timing(graph, {0: rows})
    return graph


def settle(folder, first, lengths, most, before=None):
    """run_passes, of which an earlier call has measured passes 2, 3, … (iterations of ``lengths``): one more pass would run
    the program, which there is none. Returns what was kept, told and said."""
    bare, said = alone(), io.StringIO()
    options = asked(folder, most, said)
    kept, one = Kept(bare, folder, options), np.ones(1, np.int64)
    for number, length in enumerate(lengths, 2):
        memory = Memory(np.zeros(1, np.int32), one, one, one, ["slice"])
        kept.save(f"pass-{number}-slice-0", Part(measured(bare, length).timing, memory))
    job = Job(bare, find_matches(bare), None, options, None)
    graph, told = run_passes(job, [(0, [0])], kept, measured(bare, first), before)
    return calibrate(graph).timeline.iteration_time_ns, told, said.getvalue()


def test_passes_end_when_the_iteration_time_moves_by_less_than_a_thousandth(tmp_path):
    times = [100_000, 130_000, 129_860, 129_800]
    ns, told, said = settle(tmp_path, times[0], times[1:], most=9)
    assert ns == times[-1] and [row["iteration_ns"] for row in told] == times
    assert [row["moved"] for row in told] == [None, *(b / a - 1 for a, b in zip(times, times[1:], strict=False))]
    assert -0.0011 < told[2]["moved"] < -0.001 < told[3]["moved"] < 0
    assert "the iteration time moved" not in said


def test_passes_end_when_as_many_were_made_as_were_asked_for(tmp_path):
    ns, told, said = settle(tmp_path, 100_000, [130_000, 129_860, 129_800], most=3)
    assert ns == 129_860 and len(told) == 3
    last = "warning: the iteration time moved by -0.11 % in the last pass; its own interval is ± 0.0 %: more --passes"
    assert last in said


def test_a_kept_slice_whose_clock_went_backwards_is_measured_again(tmp_path):
    """The remedy of the error that ends the passes is to run the same command again."""
    bare, said = alone(), io.StringIO()
    kept, one = Kept(bare, tmp_path, asked(tmp_path, 2, said)), np.ones(1, np.int64)
    part = Part(measured(bare, 100).timing, Memory(np.zeros(1, np.int32), one, one, one, ["slice"]))
    kept.save("slice-0", part)
    assert kept.part("slice-0", [0]) is not None and said.getvalue() == ""
    part.timing.end[0][3] = part.timing.start[0][3] - 1
    kept.save("slice-0", part)
    assert kept.part("slice-0", [0]) is None
    assert said.getvalue().endswith("; a clock went backwards, run prism-slice again: measured again\n")


def test_the_first_pass_at_calibrated_times_is_compared_with_them(tmp_path):
    before = calibrate(measured(alone(), 100_050)).timeline
    ns, told, _ = settle(tmp_path, 100_000, [], most=9, before=before)
    assert (ns, told) == (100_000, [{"iteration_ns": 100_000, "moved": 100_000 / 100_050 - 1}])


@pytest.mark.parametrize(
    "argv, problem",
    [
        (["--index", 0], "a further pass needs every slice; calibrate what all slices measured, and slice that graph"),
        (["--no-probe"], "solving needs the crossing operations' times; leave --no-probe out"),
    ],
)
def test_passes_need_everything(argv, problem, tmp_path):
    done = run("slice", "a.h5", "-s", 1, "--passes", 2, "-o", "x.h5", *argv, cwd=tmp_path, expect=2)
    assert done.stderr == f"prism-slice: --passes: {problem}\n"


def test_spread_of_own_times():
    """Three iterations, of which the last two count; runs of 10, 12, 11 and 30 each: median 11.5, quartiles 10.75 and 16.5."""
    graph = build(2, {"world": [0, 1]}, lambda rank: [compute(), step()] * 3)
    for repeat, own in enumerate((10, 12, 11, 30)):
        ends = [1000, 1000 + own, 1000 + 2 * own]
        rows = [(a, a, a, b) for k, b in enumerate(ends) for a, b in ((ends[k - 1] if k else 0, b), (b, b))]
        add_timing(graph, {0: rows} if repeat else {0: rows, 1: rows})
    assert spreads(graph) == {0: ((16.5 - 10.75) / 2 / 11.5, 4)}
    told = "rank 0's own time differs by ± 25.0 % between 4 runs; measure it again with --ranks 0-1"
    for timed, more in ((False, ""), (True, " of the calibrated graph, and --realign that with it")):
        said = io.StringIO()
        warn_of_noise(graph, [(3, [0, 1])], Progress("prism-slice", said), timed)
        assert said.getvalue() == f"prism-slice: warning: slice 3 (ranks 0-1) is noisy: {told}{more}\n"


def test_a_noisy_slice_is_named(stages, tmp_path):
    """Rank 1 takes 150, 300 and 450 ms: half the interquartile range is 25 of 100."""
    bare = stages.recorded("uneven.py", world=2)
    argv = ["run", bare.path, "-s", 1, "--repeat", 3, "--no-probe", "-o", "x.h5", "--", program("uneven.py")]
    done = run("slice", *argv, tmp_path / "count", cwd=tmp_path)
    (told,) = [
        line for line in done.stderr.splitlines() if line.startswith("prism-slice: warning: slice 1 (ranks 1) is noisy")
    ]
    spread = re.search(
        r": rank 1's own time differs by ± (\S+) % between 3 runs.*; measure it again with --ranks 1$", told
    )
    assert 20 < float(spread[1]) < 30
