"""prism-calibrate as a tool, on a program that was recorded and sliced for real."""

import re

import numpy as np
import pytest

from prism_tools.graph import file
from prism_tools.graph.check import check
from prism_tools.graph.model import Graph
from prism_tools.graph.schema import Kind, Source
from tests.tools import run

LINE = re.compile(r"iteration ([\d.,]+) → ([\d.,]+) ms \(([+−][\d.,]+) ± [\d.?]+\)\n")


def own(graph: Graph) -> np.ndarray:
    return np.concatenate([graph.durations.own[row] for row in graph.durations.row])


def test_a_plan(sums, tmp_path):
    done = run("calibrate", "--delay", "0-3=50ms", sums["calibrated"], "-o", "plan.h5", cwd=tmp_path)
    before, planned = file.read(sums["calibrated"]), file.read(tmp_path / "plan.h5")
    head = LINE.match(done.stderr)
    assert head and done.stdout == "" and check(planned) == []
    gain = planned.timeline.iteration_time_ns - before.timeline.iteration_time_ns
    assert gain == 50_000_000, "everybody is late by as much, once an iteration"
    assert head[3] == f"+{gain / 1e6:.{len(head[3].partition('.')[2])}f}"
    assert "\n  --delay 0-3=50ms: +50" in done.stderr and "(12 nodes, critical in 2 of 2 iterations)\n" in done.stderr
    assert planned.provenance[-1]["argv"].startswith("prism-calibrate --delay 0-3=50ms ")
    assert planned.steady.total_ns == before.steady.total_ns + 50_000_000 * before.steady.iterations
    changed = own(planned) != own(before)
    source = np.concatenate([planned.durations.source[row] for row in planned.durations.row])
    assert changed.sum() == 12 and (source[changed] == Source.PLANNED).all()
    text = run("inspect", "summary", "plan.h5", cwd=tmp_path).stdout
    assert re.search(r"^  where durations come from .* planned \d+ %$", text, re.M)
    assert re.search(
        r"^steady state        [\d.]+ ms ± [\d.]+  every iteration from \d on, if nothing varied$", text, re.M
    )
    assert re.search(r"^  critical cycle    rank \d: sums.py:\d+", text, re.M)


def test_plans_of_sliced_graphs_and_of_plans(sums, tmp_path):
    run("calibrate", "--ideal", "comm", sums["sliced"], "-o", "comm.h5", cwd=tmp_path)
    done = run("calibrate", "--scale", "kind=compute,mark=0", "comm.h5", "-o", "none.h5", cwd=tmp_path)
    nothing = file.read(tmp_path / "none.h5")
    assert nothing.timeline.iteration_time_ns == 0 and re.fullmatch("0.0+", LINE.match(done.stderr)[2])
    assert [row["argv"].split()[1] for row in nothing.provenance[-2:]] == ["--ideal", "--scale"]


def test_slices_of_two_ranks_realigned(sums, tmp_path):
    run("slice", "run", sums["bare"], "-s", 2, "--ranks", "0-1", "--no-probe", "-o", "new.h5", cwd=tmp_path)
    done = run("calibrate", "--realign", "new.h5", sums["calibrated"], "-o", "again.h5", cwd=tmp_path)
    assert LINE.match(done.stderr) and "\n  ranks 0-1 measured anew in new.h5: " in done.stderr
    new = file.read(tmp_path / "new.h5")
    new.environment["slice"]["answered"] = "at solved times"
    file.write(new, tmp_path / "timed.h5")
    said = run("calibrate", "--realign", "timed.h5", sums["calibrated"], "-o", "timed-again.h5", cwd=tmp_path).stderr
    what = "its virtual ranks answered at solved times, those of the calibrated graph's slices at once"
    text = f"prism-calibrate: warning: timed.h5: {what}: some of what is new may be due to that\n"
    assert said == text + done.stderr.replace("new.h5", "timed.h5")
    before, again = file.read(sums["calibrated"]), file.read(tmp_path / "again.h5")
    assert check(again) == [] and again.timing.rank.tolist() == [2, 3, 0, 1]
    for rank in range(4):
        old, now = (graph.durations.own[graph.durations.row[rank]] for graph in (before, again))
        changed = np.flatnonzero(old != now)
        assert bool(len(changed)) == (rank < 2)
        assert (again.program_of(rank).kind[changed] != Kind.COMM).all(), "the sum needs ranks 2 and 3 too"


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--scale", "op=gather=2"], "'op=gather' selects nothing: the file has ops all_reduce, recv, send"),
        (["--realign", "BARE"], "BARE: nothing was measured; run prism-slice first"),
        (["--realign", "nowhere.h5"], "nowhere.h5: "),
    ],
)
def test_errors_are_one_line(argv, message, sums, tmp_path):
    argv = [word.replace("BARE", str(sums["bare"])) for word in argv]
    done = run("calibrate", *argv, sums["calibrated"], "-o", "x.h5", cwd=tmp_path, expect=1)
    assert done.stderr.startswith(f"prism-calibrate: {message.replace('BARE', str(sums['bare']))}")
    assert done.stderr.count("\n") == 1 and not (tmp_path / "x.h5").exists()


def test_replay_delays_virtual_ranks(sums, tmp_path):
    done = run("replay", "-r", "0-1", "--delay", "3=500ms", sums["calibrated"], "-o", "replayed.h5", cwd=tmp_path)
    graph = file.read(tmp_path / "replayed.h5")
    assert LINE.match(done.stderr) and check(graph) == []
    for times in graph.replay.timing.iteration_ns:  # a late end of the first shortens the others
        assert times[1:].sum() >= 800_000_000 - graph.replay.late_ns[0], "each step waits for rank 3"
    text = "ranks 0-1 run for real in this replay; select virtual ranks"
    done = run("replay", "-r", "0-1", "--delay", "1=9ms", sums["calibrated"], "-o", "x.h5", cwd=tmp_path, expect=1)
    assert done.stderr == f"prism-replay: --delay 1=9ms: {text}\n"
    done = run("replay", "-r", "0-1", "--delay", "3=9ms", sums["sliced"], "-o", "x.h5", cwd=tmp_path, expect=1)
    assert "not calibrated yet; run prism-calibrate first" in done.stderr
