"""What clusters do to jobs that run: requeue them, preempt them, lose their nodes, end their time. On real daemons."""

import pytest

from prism_tools.graph import file
from tests.cluster.gate import Gate
from tests.tools import until


@pytest.fixture
def gate(slurm, tmp_path, stages):
    return Gate(slurm, tmp_path, stages)


def lose_the_node(slurm, gate, part):
    """Kill the daemon of the node of a part's ranks, and have Slurm notice at once; then the node comes back: once its new
    daemon has registered, see ReturnToService in mini.py."""
    node = gate.node(part)
    slurm.stop_node(node)
    slurm.start_node(node)


def test_slices_start_again(slurm, gate):
    """Three of four slices lose their jobs in three ways. The fourth runs on; of first attempts no process is left."""
    driver = gate.start(size=1)
    gate.arrived(4)
    before = gate.ranks()
    slurm.run("scontrol", "requeue", gate.job("slice-1"))
    slurm.run("scancel", "--batch", "--signal=USR2", gate.job("slice-2"))  # as before a preemption
    lose_the_node(slurm, gate, "slice-3")
    gate.arrived(3, attempt=1)
    first = {line for line in before if "slice-0.h5" in line}
    assert first
    until(lambda: set(before) & set(gate.ranks()) == first)
    gate.open()
    assert gate.finish(driver) == 0, gate.said
    assert gate.sliced() == [0, 1, 2, 3]
    assert gate.said.count("slice-0: running") == 1 and gate.said.count(": done") == 4


def test_preempted(slurm, gate):
    """A job of a partition with a higher priority takes nodes from slices, which start again when these are free; of the others
    no process has changed."""
    driver = gate.start(size=1)
    gate.arrived(4)
    before = set(gate.ranks())
    slurm.run("srun", "--partition=urgent", "--nodes=2", "true")
    gate.arrived(2, attempt=1)

    def kept():
        return {k for k in "0123" for line in before & set(gate.ranks()) if f"slice-{k}.h5" in line}

    def begun_again():
        return {path.name.split(".")[1] for path in gate.folder.glob("gate.*.*.1")}

    until(lambda: kept() == set("0123") - begun_again())
    gate.open()
    assert gate.finish(driver) == 0, gate.said
    assert gate.sliced() == [0, 1, 2, 3]
    assert not list(gate.folder.glob("gate.*.*.2"))


def test_the_end_of_its_time(slurm, gate):
    """A slice whose time is over has failed, and is not tried again; the other one is done."""
    driver = gate.start(options=["--slurm-args=--time=60"])
    gate.arrived(2)
    # The client reads the clock; where the daemon's next second has begun meanwhile, it refuses a time that is past.
    ended = ("scontrol", "update", f"jobid={gate.job('slice-1')}", "endtime=now")
    until(lambda: slurm.run(*ended, expect=None).status == 0)
    until(lambda: "JobState=TIMEOUT" in gate.show("slice-1"))
    gate.open()
    assert gate.finish(driver) == 1
    assert "prism-slice: 1 of 2 jobs failed, first slice-1 (job " in gate.said and ", TIMEOUT, " in gate.said
    assert "slice-0: done" in gate.said
    until(lambda: gate.ranks() == [])


def test_a_pair_starts_again(slurm, gate, sums, tmp_path):
    """A replay's two nodes are taken by a job that may preempt it, then its ranks' node is lost: both times it begins anew
    as a whole, and of the attempt before no process is left on either node."""
    argv = ["-r", "0-1", sums["calibrated"], "-o", "replayed.h5", "--slurm", *gate.program]
    driver = gate.start_tool("replay", *argv)
    gate.arrived(1)
    first = set(gate.ranks())
    assert len({line for line in first if "capture.agent" in line}) >= 3  # an agent and its two ranks, and their srun
    slurm.run("srun", "-Q", "--partition=urgent", "-N4", "--exclusive", "true")
    gate.arrived(1, attempt=1)
    second = set(gate.ranks())
    lose_the_node(slurm, gate, "replay")
    gate.arrived(1, attempt=2)
    until(lambda: not set(gate.ranks()) & (first | second))
    gate.open()
    assert gate.finish(driver) == 0, gate.said
    assert file.read(tmp_path / "replayed.h5").replay.timing.rank.tolist() == [0, 1]
    until(lambda: gate.ranks() == [])
