"""Slices and replays with the assistant on one node and the sandbox's ranks on others, one of which has another clock."""

import signal
import time

import numpy as np
import pytest

from prism_tools.graph import file
from tests.tools import LIMIT, ROOT, command, marked, said, until

SECOND = 10**9  # ns
SANDBOX = "2-3"
DYING = "import os, signal\nos.kill(os.getpid(), signal.SIGKILL) if os.environ['RANK'] == '1' else signal.pause()\n"


@pytest.fixture(scope="module")
def gpt(stages):
    """Recorded, calibrated and, on one machine, replayed: its ranks 2 and 3 are a group of their own, in two pipelines."""
    bare = stages.recorded("gpt.py", "--pp", "2", world=4)
    calibrated = stages.calibrated(stages.sliced(bare))
    return bare, calibrated, stages.replayed(calibrated, SANDBOX)


def on_nodes(slurm, count, tool, *words, folder, expect=0):
    """What a tool says in an allocation of ``count`` nodes, whose number it finds by itself."""
    return slurm.run("salloc", "-Q", f"-N{count}", "--exclusive", *command(tool, *words), cwd=folder, expect=expect)


@pytest.mark.parametrize("count", [2, 3])
def test_a_replay(count, slurm, gpt, tmp_path):
    """The same losses, and no rank waits for a clock that is a quarter of an hour ahead. With three nodes the ranks' own
    group is between two of them."""
    _, calibrated, alone = gpt
    done = on_nodes(slurm, count, "replay", "-r", SANDBOX, calibrated.path, "-o", "run.h5", folder=tmp_path)
    assert (said(done.stdout, "loss"), done.stderr) == (alone.lines("loss"), "")
    there, here = (file.read(path).replay for path in (tmp_path / "run.h5", alone.path))
    now = time.monotonic_ns()
    starts = [int(times[0]) - now for times in there.timing.host_issue]
    others = [start > 0 for start in starts]  # than this machine's clock
    assert others == [slurm.ahead > 0, slurm.ahead > 0 and count == 2]
    spent = np.array(there.timing.iteration_ns)
    assert spent.shape == np.array(here.timing.iteration_ns).shape and 0 < spent.max() < LIMIT * SECOND
    assert there.late_ns.max() < LIMIT * SECOND
    assert there.groups_created == here.groups_created and there.virtual_ranks_touched == here.virtual_ranks_touched
    offset, error, drift = (getattr(there.timing, f"clock_{name}").tolist() for name in ("offset", "error", "drift"))
    assert (offset[0], error[0], drift[0]) == (0, 0, 0)  # all are told against the clock of the first rank's node
    if count == 2:
        assert (offset[1], error[1], drift[1]) == (0, 0, 0)
    else:
        assert abs(offset[1] - slurm.ahead * SECOND) <= error[1] < SECOND // 10


def test_slices(slurm, gpt, tmp_path):
    """One agent serves all slices, repeats and probes."""
    bare, *_ = gpt
    words = [bare.path, "-s", 2, "--repeat", 2, "-v", "-o", "run.h5"]
    done = on_nodes(slurm, 2, "slice", *words, folder=tmp_path)
    assert said(done.stdout, "loss") == sorted(bare.lines("loss") * 2)
    timing = file.read(tmp_path / "run.h5").timing
    assert timing.slice.tolist() == [0, 0, 0, 0, 1, 1, 1, 1] and timing.repeat.tolist() == [0, 0, 1, 1] * 2
    assert (min(int(times[0]) for times in timing.host_issue) > time.monotonic_ns()) == (slurm.ahead > 0)
    assert not timing.clock_error.any()


def test_a_rank_that_dies(slurm, sums, tmp_path):
    """Named with its node; the allocation goes on, and nothing of the replay is left in it."""
    (tmp_path / "program.py").write_text(DYING)
    words = ["-r", "0-1", sums["calibrated"], "-o", "run.h5", "--", tmp_path / "program.py"]
    then = ["sh", "-c", '"$@"; echo status $?; exec cat', "sh", *command("replay", *words)]
    salloc = slurm.start("salloc", "-Q", "-N2", "--exclusive", *then, cwd=tmp_path)
    try:
        ended = salloc.stdout.readline()
        until(lambda: not [line for line in marked(slurm.mark) if "prism" in line and "salloc" not in line])
    finally:
        _, told = salloc.communicate(timeout=LIMIT)  # closes the input of cat
    words = "prism-replay: rank 1 on node n2 was killed by SIGKILL\n"
    assert (ended, told) == (f"status {128 + signal.SIGKILL}\n", words)


def test_nodes_of_two_kinds(slurm, sums, tmp_path):
    """The script for a heterogeneous job, whose second component has the ranks."""
    script = ROOT / "slurm" / "replay-het.sbatch"
    where = ["--nodelist=n1", ":", "--partition=urgent", "--nodelist=n2"]
    words = [*where, script, "-r", "0-1", sums["calibrated"], "-o", "run.h5"]
    job = slurm.run("sbatch", "--parsable", "-o", "log", *words, cwd=tmp_path).stdout.strip()
    slurm.run("srun", "-Q", f"--dependency=afterany:{job}", "true")
    assert (tmp_path / "log").read_text() == "check rank 0 message [3.0, 3.0, 3.0]\n"
    first = int(file.read(tmp_path / "run.h5").replay.timing.host_issue[0][0])
    assert (first > time.monotonic_ns()) == (slurm.ahead > 0)  # n2's clock
