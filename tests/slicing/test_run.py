"""Slices: which ranks run together, what is measured of them, and what a pipe carries."""

import subprocess

import numpy as np
import pytest

from prism_tools.errors import PrismError
from prism_tools.graph import file
from prism_tools.graph.schema import Kind
from prism_tools.slicing.plan import slices
from tests.graph.builder import build, comm, compute, train4
from tests.tools import LIMIT, SUMS, command, environment, run


def test_slices_are_consecutive_and_cover_every_rank():
    graph = build(7, {"world": list(range(7))}, lambda rank: [compute(), comm("barrier", "world"), compute()])
    assert slices(graph, 3) == [[0, 1, 2], [3, 4, 5], [6]]
    assert slices(graph, 7) == [[0, 1, 2, 3, 4, 5, 6]]
    with pytest.raises(PrismError, match=r"no slice of 8 ranks \(file has 0-6\)"):
        slices(graph, 8)


def test_plan(tmp_path):
    """Of TP pairs (0,1), (2,3) and DP pairs (0,2), (1,3): a slice of two holds one TP pair; the rest and world cross."""
    file.write(train4(), tmp_path / "bare.h5")
    done = run("slice", "plan", "bare.h5", "-s", 2, cwd=tmp_path)
    assert done.stdout.splitlines() == [
        "index\tranks\tnodes\tgroups inside\tgroups crossing",
        "0\t0-1\t0\t1\t3",
        "1\t2-3\t0\t1\t3",
    ]


def test_every_rank_is_measured_once(sums):
    graph = file.read(sums["sliced"])
    timing = graph.timing
    assert (timing.rank.tolist(), timing.slice.tolist()) == ([0, 1, 2, 3], [0, 0, 1, 1])
    assert timing.repeat.tolist() == [0, 0, 0, 0]
    for rank in range(4):
        kind = graph.program_of(rank).kind
        issue, ready, start, end = (rows[rank] for rows in (timing.host_issue, timing.ready, timing.start, timing.end))
        assert len(issue) == len(kind)
        assert (issue <= start).all() and (issue <= ready).all() and (start <= end).all()
        host = np.flatnonzero(graph.program_of(rank).lane == 0)
        assert (end[host][:-1] <= start[host][1:]).all()
        spans = host[kind[host] == Kind.COMPUTE]
        assert (end[spans] > start[spans]).any()
        assert len(timing.iteration_ns[rank]) == graph.iterations() == 3
    assert sorted(graph.memory.rank.tolist()) == [0, 1, 2, 3] and (graph.memory.rss > 50 << 20).all()
    assert len(graph.probes.op) >= 2 and (graph.probes.duration > 0).all()


def test_a_second_run_adds_to_the_first(sums, tmp_path):
    argv = ["run", sums["sliced"], "-s", 2, "--ranks", 3, "--repeat", 2, "--no-probe", "-o", "more.h5"]
    run("slice", *argv, cwd=tmp_path)
    graph, before = file.read(tmp_path / "more.h5"), file.read(sums["sliced"])
    assert graph.timing.rank.tolist() == [0, 1, 2, 3, 2, 3, 2, 3]
    assert graph.timing.slice.tolist() == [0, 0, 1, 1, 2, 2, 2, 2]
    assert graph.timing.repeat.tolist() == [0, 0, 0, 0, 0, 0, 1, 1]
    assert all(np.array_equal(a, b) for a, b in zip(graph.timing.end, before.timing.end, strict=False))
    assert np.array_equal(graph.probes.duration, before.probes.duration)
    assert len(graph.memory.rank) == 4
    assert [row["tool"] for row in graph.provenance] == ["prism-record", "prism-slice", "prism-slice"]


def test_verbose_output_of_the_program_does_not_get_into_the_pipe(sums, tmp_path):
    call = command("slice", "run", "-v", sums["bare"], "-s", 1, "--ranks", 0, "--no-probe")
    done = subprocess.run(call, cwd=tmp_path, env=environment(), capture_output=True, timeout=LIMIT)
    assert (done.returncode, done.stderr) == (0, b"check rank 0 message [3.0, 3.0, 3.0]\n")
    (tmp_path / "sliced.h5").write_bytes(done.stdout)
    assert file.read(tmp_path / "sliced.h5").timing.rank.tolist() == [0]


def test_another_program_in_place_of_the_recorded_one(sums, tmp_path):
    """The same one from another place: it is what its operations do that counts."""
    (tmp_path / "copy.py").write_text(SUMS.read_text())
    argv = ["run", sums["bare"], "-s", 2, "--ranks", 0, "--no-probe", "-o", "copy.h5", "--", str(tmp_path / "copy.py")]
    run("slice", *argv, cwd=tmp_path)
    graph = file.read(tmp_path / "copy.h5")
    assert graph.timing.rank.tolist() == [0, 1] and graph.launch.argv == [str(tmp_path / "copy.py")]


def test_ranks_with_real_groups_end(stages, tmp_path):
    """Torch may destroy a group while it holds the interpreter's lock, which a thread of the group waits for (1 in 50)."""
    bare = stages.recorded("ddp.py", world=2)
    argv = ["run", bare.path, "-s", 2, "--repeat", 25, "--no-probe", "-o", "sliced.h5"]
    run("slice", *argv, cwd=tmp_path)
    assert len(file.read(tmp_path / "sliced.h5").timing.rank) == 50
