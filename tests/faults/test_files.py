"""Graph and payload files that are damaged, of other owners or recordings, and ranks that they do not have."""

import json
import os
import shutil

import pytest

from prism_tools.graph import file
from tests.tools import SUMS, program


def readers(path):
    """A call of each tool that reads a graph."""
    return [
        ("slice", "run", path, "-s", 2, "-o", "x.h5"),
        ("calibrate", path, "-o", "x.h5"),
        ("replay", "-r", 0, path, "-o", "x.h5"),
        ("inspect", "summary", path),
    ]


def damaged(sums, folder):
    """Name → what every tool says about it."""
    whole = sums["calibrated"].read_bytes()
    contents = {
        "cut.h5": (whole[: len(whole) // 2], "is truncated"),
        "text.h5": (b"not a graph at all, but long enough to be one\n" * 10, "is not an HDF5 file"),
        "empty.h5": (b"", "is empty"),
    }
    for name, (content, _) in contents.items():
        (folder / name).write_bytes(content)
    return {name: problem for name, (_, problem) in contents.items()} | {"absent.h5": "cannot be read"}


def test_every_tool_refuses_a_damaged_graph(bench, sums):
    for name, problem in damaged(sums, bench.out).items():
        calls = readers(name) if name == "cut.h5" else [("calibrate", name, "-o", "x.h5"), ("inspect", "summary", name)]
        for call, done in zip(calls, bench.run_all(*calls, expect=1), strict=True):
            assert done.stderr.startswith(f"prism-{call[0]}: {name}: {problem}"), done.stderr
            assert done.stderr.count("\n") == 1 and done.stdout == ""
    assert "x.h5" not in bench.files()


def moved(sums, stage, folder, payload):
    """A copy of a graph whose payload store is a copy too, so that a test may spoil it."""
    graph = file.read(sums[stage])
    shutil.copy(sums[stage].parent / graph.payload.path, folder / payload)
    graph.payload.path = str(folder / payload)
    file.write(graph, folder / f"{stage}.h5")
    return folder / payload


@pytest.mark.parametrize("problem", ["missing", "truncated", "of another recording"])
def test_payloads(problem, bench, sums, halting):
    said = {
        "missing": "cannot read the recorded payloads; record again or restore the file",
        "truncated": "truncated payload store; record again",
        "of another recording": "belongs to another recording; record again",
    }
    for stage in ("bare", "calibrated"):
        path = moved(sums, stage, bench.out, "run.payload")
    if problem == "missing":
        path.unlink()
    elif problem == "truncated":
        os.truncate(path, path.stat().st_size - 5)
    else:
        shutil.copy(halting["bare"].parent / file.read(halting["bare"]).payload.path, path)
    calls = [("slice", "bare.h5", "-s", 2, "-o", "x.h5"), ("replay", "-r", 0, "calibrated.h5", "-o", "x.h5")]
    for call, done in zip(calls, bench.run_all(*calls, expect=1), strict=True):
        assert done.stderr == f"prism-{call[0]}: {path}: {said[problem]}\n" and done.stdout == ""
    assert "x.h5" not in bench.files()


def test_unknown_ranks(bench, sums):
    for stage in sums:
        shutil.copy(sums[stage], bench.out / f"{stage}.h5")
    calls = [
        ("replay", "-r", "0,12", "calibrated.h5", "-o", "x.h5"),
        ("slice", "run", "bare.h5", "-s", 2, "--ranks", "3,12", "-o", "x.h5"),
    ]
    stderr = [done.stderr for done in bench.run_all(*calls, expect=1)]
    assert stderr == [
        "prism-replay: calibrated.h5: no rank 12 (file has 0-3)\n",
        "prism-slice: bare.h5: no rank 12 (file has 0-3)\n",
    ]


def test_a_stage_that_has_not_run(bench, sums):
    calls = [("replay", "-r", 0, sums["sliced"], "-o", "x.h5"), ("calibrate", sums["bare"], "-o", "x.h5")]
    stderr = [done.stderr for done in bench.run_all(*calls, expect=1)]
    assert stderr[0] == f"prism-replay: {sums['sliced']}: not calibrated yet; run prism-calibrate first\n"
    assert stderr[1] == "prism-calibrate: no rank was ever measured; run prism-slice first\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="giving files away needs root")
def test_another_user_s_file(bench, sums):
    """Its program is run only where that is asked for; calibrating does not launder it."""
    for stage in ("bare", "sliced", "calibrated"):
        shutil.copy(sums[stage], bench.out / f"{stage}.h5")
        os.chown(bench.out / f"{stage}.h5", 12345, -1)
    for payloads in sums["bare"].parent.glob("*.payload"):  # looked for beside the graph
        shutil.copy(payloads, bench.out)
    bench.run("calibrate", "sliced.h5", "-o", "mine.h5")
    bench.run("inspect", "summary", "bare.h5")
    calls = [
        ("slice", "bare.h5", "-s", 2, "-o", "x.h5"),
        ("replay", "-r", 0, "calibrated.h5", "-o", "x.h5"),
        ("replay", "-r", 0, "mine.h5", "-o", "x.h5"),
    ]
    names = ["bare.h5", "calibrated.h5", "mine.h5"]
    remedy = "recorded program is owned by another user; add --trust to run it, or give -- command"
    for name, call, done in zip(names, calls, bench.run_all(*calls, expect=1), strict=True):
        assert done.stderr == f"prism-{call[0]}: {name}: {remedy}\n"
    assert "x.h5" not in bench.files()
    bench.run("replay", "-r", 0, "--trust", "mine.h5", "-o", "trusted.h5")
    assert file.read(bench.out / "trusted.h5").launch.foreign_owner == -1


def test_another_hash_seed(bench, sums):
    done = bench.run("replay", "-r", 0, sums["calibrated"], "-o", "x.h5", expect=1, PYTHONHASHSEED="7")
    expected = "the program was recorded with another hash seed; set PYTHONHASHSEED=0"
    assert done.stderr == f"prism-replay: {expected}\n"


def test_a_graph_and_its_payloads_move_together(bench, sums):
    """Their names are relative to each other, in every stage's file, and no path of before is needed."""
    home = bench.out / "home"
    (home / "deep").mkdir(parents=True)
    bench.run("record", "-n", 4, "-o", "home/bare.h5", "--", SUMS)
    bench.run("slice", "home/bare.h5", "-s", 4, "--no-probe", "-o", "home/deep/sliced.h5")
    assert file.read(home / "deep" / "sliced.h5").payload.path == "../bare.payload"
    home.rename(bench.out / "away")
    bench.run("calibrate", "away/deep/sliced.h5", "-o", "calibrated.h5")
    assert file.read(bench.out / "calibrated.h5").payload.path == "away/bare.payload"
    done = bench.run("inspect", "payloads", "--verify", "--format", "json", "calibrated.h5")
    listed = json.loads(done.stdout)
    assert [row["rank"] for row in listed] == sorted([0, 1, 2, 3] * 6 + [3]) and done.stderr == ""
    first = {"rank": 0, "node": 1, "iteration": 0, "op": "all_reduce", "dtype": "float32", "count": 4, "bytes": 16}
    assert first.items() <= listed[0].items() and listed[0]["kept"] == "whole" and len(listed[0]["checksum"]) == 32
    store = bench.out / "away" / "bare.payload"
    store.write_bytes(store.read_bytes().replace(b"\0\0\x40\x40" * 3, b"\0\0\x40\x41" * 3))
    done = bench.run("inspect", "payloads", "--verify", "calibrated.h5", expect=1)
    problem = "rank 3 node 19: damaged payload (checksum differs); record again"
    assert done.stderr == f"{store}: {problem}\n"
    assert "kept      25 whole (300 B), 0 as summaries (0 B)" in done.stdout
    assert "contents  7 distinct (84 B, 28.0 % of what is kept)" in done.stdout


def test_the_budget_of_payloads_is_exceeded(bench):
    """What is beyond it is not kept, and record says so (a replay then says what it misses: tests/emulate)."""
    (bench.out / "large.py").write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "for count in (20_000, 10, 30_000):\n"
        "    dist.broadcast(torch.randn(count), 0)\n"
    )
    done = bench.run("record", "-n", 2, "--tensor-budget", "100K", "-o", "bare.h5", "--", "large.py")
    first = "beyond the budget 1 payload is a summary only"
    told = f"warning: {first} (120,000 B, since iteration 2); add --tensor-budget"
    assert done.stderr == f"prism-record: {told}\n"
    graph = file.read(bench.out / "bare.h5")
    assert (graph.payload.mode, graph.payload.bytes) == ("partial", 24 + 80_000 + 40)


def test_a_recording_stops_after_its_iterations(bench):
    """One of warm-up and two more; ranks end where they would begin the next one."""
    argv = ["-n", 4, "--iterations", 2, "-o", "run.h5", "--", program("forever.py")]
    done = bench.run("record", *argv)
    assert (done.stdout, done.stderr) == ("ready\n", "")
    graph = file.read(bench.out / "run.h5")
    assert graph.iterations() == 3 and graph.launch.stop_after == 3 and graph.launch.warmup == 1
    for rank in range(4):
        segments = graph.program_of(rank).segment
        assert sorted(set(segments[segments >= 0].tolist())) == [0, 1, 2]
