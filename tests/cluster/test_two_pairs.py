"""Four nodes, two pairs: n1, the tool's, plays for the ranks on n3, and a second assistant on n2 for those on n4."""

import os
import signal

import numpy as np
import pytest

from prism_tools.graph import file
from tests.cluster.halted import HALTING, Halted
from tests.tools import LIMIT, ROOT, command, run, said

SECOND = 10**9  # ns


def on_four(slurm, folder, tool, *words):
    """What a tool says in an allocation of all nodes, whose number it finds by itself."""
    return slurm.run("salloc", "-Q", "-N4", "--exclusive", *command(tool, *words), cwd=folder)


def test_a_replay(slurm, stages, tmp_path):
    """What one machine replays of two pipelines; each rank is in a group with virtual ones, the two are one of their own."""
    calibrated = stages.calibrated(stages.sliced(stages.recorded("gpt.py", "--pp", "2", world=4)))
    alone = stages.replayed(calibrated, "2-3")
    done = on_four(slurm, tmp_path, "replay", "-r", "2-3", calibrated.path, "-o", "run.h5")
    assert (said(done.stdout, "loss"), done.stderr) == (alone.lines("loss"), "") and said(done.stdout, "loss")
    there, here = (file.read(path).replay for path in (tmp_path / "run.h5", alone.path))
    spent = np.array(there.timing.iteration_ns)
    assert spent.shape == np.array(here.timing.iteration_ns).shape and 0 < spent.max() < LIMIT * SECOND
    assert there.late_ns.max() < LIMIT * SECOND
    assert there.groups_created == here.groups_created and there.virtual_ranks_touched == here.virtual_ranks_touched
    # The second assistant's clock, a quarter of an hour ahead, is nobody's concern: both ranks are on nodes with ours.
    assert not any(getattr(there.timing, f"clock_{name}").any() for name in ("offset", "error", "drift"))


def test_values_of_both_pairs_meet(slurm, stages, tmp_path):
    """Operations of every kind, too large for a datagram, with rank 0 in one pair, 3 in the other, 1 and 2 virtual:
    what ranks of one pair contribute reaches the other, in one run after another."""
    bare = stages.recorded("large.py", world=4)
    words = ["run", bare.path, "-s", 2, "--ranks", "0,3", "--repeat", 2, "--no-probe", "-v", "-o", "run.h5"]
    done = on_four(slurm, tmp_path, "slice", *words)
    assert said(done.stdout, "check") == sorted(bare.lines("check", {0, 3}) * 2) != []
    assert [line for line in done.stderr.splitlines() if "is noisy" not in line] == []


def test_one_rank_for_many(slurm, stages, tmp_path):
    """Virtual ranks that did not run contribute what the ones did that ran for them, whichever assistant reads it."""
    options = ("--dedup", "--rules", ROOT / "share" / "prism" / "rules" / "self.toml")
    bare = stages.recorded("ddp.py", world=4, options=options)
    words = ["run", bare.path, "-s", 2, "--ranks", "0,3", "--no-probe", "-v", "-o", "run.h5"]
    assert file.read(bare.path).ranks.ran.tolist() == [0, 0, 0, 3]
    alone = run("slice", *words, cwd=tmp_path)
    done = on_four(slurm, tmp_path, "slice", *words)
    assert said(done.stdout, "loss") == alone.lines("loss") != []


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where HALTING was recorded, and is run again."""
    there = tmp_path_factory.mktemp("halting")
    run("record", "-n", 4, "-o", "bare.h5", "--", HALTING, cwd=there)
    return there


@pytest.fixture
def halted(slurm, folder):
    """A slice whose rank 0, on n3, waits for good, and rank 1, on n4, for it."""
    words = ["run", "bare.h5", "-s", 2, "--ranks", "0-1", "--no-probe", "-o", "run.h5"]
    slices = Halted(slurm, folder, "slice", *words)
    yield slices
    (folder / "gate").unlink()
    slices.salloc.kill()
    slices.salloc.communicate()


@pytest.mark.parametrize(
    ("process", "node", "words"),
    [
        ("emulate.second", "n2", "node n4: its assistant on node n2 is gone; rank 1 ran there"),
        ("capture.agent", "n4", "node n4: its agent is gone; rank 1 ran there"),
        ("bin/prism-slice", "", ""),
    ],
)
def test_one_of_them_is_killed(process, node, words, halted):
    """All the others end."""
    os.kill(halted.process(process, node), signal.SIGKILL)
    done = halted.finish()
    assert done.status == (1 if words else 128 + signal.SIGKILL)
    assert [line for line in done.stderr.splitlines() if line.startswith("prism-")] == [f"prism-slice: {words}"] * bool(
        words
    )
