"""Slices that run at once, and calls that were stopped: the same graph in the end, and nothing measured twice."""

import errno
import os

import numpy as np
import pytest

from prism_tools.errors import PrismError
from prism_tools.graph import file
from prism_tools.graph.check import check
from prism_tools.slicing.parallel import available_memory, in_processes
from tests.tools import SUMS, marked, until

# Rank 2 says that it is there, and waits until somebody opens the pipe for writing; any other rank, and without a pipe, none.
GATE = """
import os, sys
if os.environ["RANK"] == "2" and os.path.exists(sys.argv[1]):
    open(sys.argv[1] + ".ready", "w").close()
    open(sys.argv[1]).read()
"""
two_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two slices at once need two cores")


def parts(bench):
    """Names of the finished slices that are kept, and their folder."""
    (folder,) = bench.out.glob("sliced.h5.*.parts")
    return {path.stem for path in folder.iterdir() if path.suffix == ".h5" and path.name[0] != "."}, folder


@two_cores
def test_stopped_killed_and_finished(bench, sums):
    """Slices of one rank, two at a time; that of rank 2 stands still until the third call."""
    gate, program = bench.out.parent / "gate", bench.out.parent / "program.py"
    program.write_text(GATE + SUMS.read_text())
    os.mkfifo(gate)
    call = ["slice", "run", sums["bare"], "-s", 1, "--parallel", 2, "--no-probe", "-o", "sliced.h5"]
    call += ["--", program, gate]

    child = bench.start(*call)
    until(lambda: list(bench.out.glob("*.parts")) and parts(bench)[0] == {"slice-0", "slice-1", "slice-3"})
    until(gate.with_suffix(".ready").exists)
    child.terminate()
    done = bench.finish(child)
    _, folder = parts(bench)
    told = f"prism-slice: warning: finished slices are kept in {folder}; the same command goes on\n"
    assert (done.status, done.stderr) == (143, told) and not marked(bench.mark)
    kept = {rank: file.read(folder / f"slice-{rank}.h5").timing for rank in (0, 1, 3)}
    (folder / "slice-3.h5").write_bytes(b"\x89HDF\r\n\x1a\nnot what it was")

    gate.with_suffix(".ready").unlink()
    child = bench.start(*call)
    until(lambda: gate.with_suffix(".ready").exists())
    assert "the same command is running" in bench.run(*call, expect=1).stderr
    child.kill()
    until(lambda: not marked(bench.mark))
    said = bench.finish(child).stderr.splitlines()
    assert said[0].startswith(f"prism-slice: warning: {folder}/slice-3.h5: is ") and said[0].endswith(
        ": measured again"
    )
    assert said[1] == "prism-slice: warning: 2 of 4 slices were measured by an earlier call; -f begins anew"

    gate.unlink()
    done = bench.run(*call)
    graph = file.read(bench.out / "sliced.h5")
    assert bench.files() == {"sliced.h5"} and check(graph) == []
    assert graph.timing.rank.tolist() == graph.timing.slice.tolist() == graph.memory.rank.tolist() == [0, 1, 2, 3]
    for rank in (0, 1):
        assert all(
            np.array_equal(getattr(kept[rank], name)[0], getattr(graph.timing, name)[rank]) for name in ("start", "end")
        )
    assert not np.array_equal(kept[3].start[0], graph.timing.start[3])
    assert [row["tool"] for row in graph.provenance] == ["prism-record", "prism-slice"]
    whole = file.read(sums["sliced"])
    assert [len(row) for row in graph.timing.start] == [len(row) for row in whole.timing.start]


def test_a_fresh_start(bench, sums):
    """A slice that fails leaves the one before; -f has no use for it."""
    program = bench.out.parent / "program.py"
    program.write_text(
        f"import os, sys\nif int(os.environ['RANK']) >= int(sys.argv[1]): sys.exit(3)\n{SUMS.read_text()}"
    )
    call = ["slice", "run", sums["bare"], "-s", 2, "--no-probe", "-o", "sliced.h5"]
    failing = ["--", program, 2]
    done = bench.run(*call, *failing, expect=3)
    assert done.stderr.splitlines()[-1] in [f"prism-slice: rank {rank} ended with exit status 3" for rank in (2, 3)]
    names, folder = parts(bench)
    assert names == {"slice-0"}
    before = (folder / "slice-0.h5").stat().st_ino
    assert "1 of 2 slices were measured by an earlier call" in bench.run(*call, *failing, expect=3).stderr
    assert (folder / "slice-0.h5").stat().st_ino == before
    assert "earlier call" not in bench.run(*call, "-f", *failing, expect=3).stderr
    assert parts(bench) == ({"slice-0"}, folder) and (folder / "slice-0.h5").stat().st_ino != before


@two_cores
def test_a_slice_that_fails_beside_others(bench, sums):
    program = bench.out.parent / "program.py"
    program.write_text(
        f"import os, signal\nif os.environ['RANK'] == '2': os.kill(os.getppid(), signal.SIGKILL)\n{SUMS.read_text()}"
    )
    call = ["slice", "run", sums["bare"], "-s", 1, "--parallel", 2, "--no-probe", "-o", "sliced.h5", "--", program]
    done = bench.run(*call, expect=1)
    told = "the process of a slice was killed by SIGKILL; with less --parallel there is more memory for each"
    assert done.stderr.splitlines()[-1] == f"prism-slice: {told}"
    assert {"slice-0"} <= parts(bench)[0] <= {"slice-0", "slice-1", "slice-3"}


def test_what_the_system_refuses_in_a_slice_is_said_as_it_is():
    def refused(_):
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    with pytest.raises(PrismError, match="^a slice: Resource temporarily unavailable$"):
        list(in_processes([0, 1], 2, refused))


def test_more_than_the_machine_holds(bench, sums):
    cores = len(os.sched_getaffinity(0))
    done = bench.run("slice", sums["bare"], "-s", 2, "--parallel", cores, "-o", "x.h5", expect=2)
    told = f"--parallel {cores}: {cores} slices of 2 ranks at once need {2 * cores} cores, there are {cores}"
    if cores > 1:
        assert done.stderr == f"prism-slice: {told}; at most --parallel {cores // 2}\n" and bench.files() == set()
    assert 0 < available_memory() < 1 << 50


@pytest.mark.parametrize("more", [["--parallel", 2], ["--passes", 2], ["-f"]])
def test_not_with_slurm(more, bench):
    done = bench.run("slice", "a.h5", "-s", 1, "-o", "x.h5", "--slurm", *more, expect=2)
    told = "--parallel, --passes and --force are for this machine; a calibrated graph makes the next pass"
    assert done.stderr == f"prism-slice: --slurm: {told}\n"
