"""The mini Slurm itself: its nodes run what they are told, and nothing of it is left."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.mini import MiniSlurm
from tests.tools import LIMIT, ROOT, environment, marked, until


def test_its_nodes_are_idle_and_run_steps(slurm):
    assert slurm.idle() == ["n1", "n2", "n3", "n4"]
    done = slurm.run(
        "srun", "-N4", "--ntasks-per-node=2", "sh", "-c", "echo $SLURM_PROCID $SLURMD_NODENAME; hostname >&2"
    )
    assert sorted(done.stdout.splitlines()) == [f"{rank} n{rank // 2 + 1}" for rank in range(8)]
    assert done.stderr.split() == [os.uname().nodename] * 8


def test_its_batch_jobs_run(slurm, tmp_path):
    slurm.run("sbatch", "--wait", "-N2", "-o", tmp_path / "out", "--wrap", "srun printenv SLURMD_NODENAME")
    assert sorted((tmp_path / "out").read_text().split()) == ["n1", "n2"]


def test_nothing_is_left_when_it_stops(slurm, tmp_path):
    """A second one beside the first (ports and keys are its own), stopped while a step runs."""
    hosts = Path("/etc/hosts").read_bytes()
    with MiniSlurm(tmp_path, nodes=2) as other:
        step = subprocess.Popen(
            ["srun", "-N2", "sh", "-c", "echo here; sleep 100"], env=other.variables(), stdout=subprocess.PIPE
        )
        assert step.stdout.readline() == b"here\n" and len(marked(other.mark)) > 6
    assert step.wait(timeout=LIMIT) != 0
    assert marked(other.mark) == [] and Path("/etc/hosts").read_bytes() == hosts
    assert slurm.idle() == slurm.nodes, "the first one is not touched"


OWNER = """
import signal, subprocess, sys
from pathlib import Path
from tests.cluster.mini import MiniSlurm
with MiniSlurm(Path(sys.argv[1]), nodes=2) as cluster:
    print(cluster.mark, flush=True)
    subprocess.Popen(["srun", "sh", "-c", "echo here; sleep 100"], env=cluster.variables())
    signal.pause()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_when_its_owner_is_ended(slurm, tmp_path, number):
    argv = [sys.executable, "-c", OWNER, tmp_path]
    with subprocess.Popen(argv, env=environment(), cwd=ROOT, stdout=subprocess.PIPE, text=True) as owner:
        mark = owner.stdout.readline().strip()
        assert owner.stdout.readline() == "here\n" and len(marked(mark)) > 6
        owner.send_signal(number)
        assert owner.wait(timeout=LIMIT) == -number
        until(lambda: not marked(mark))
