"""prism-record over four nodes: what one machine would have recorded, and no process left however it ends."""

import os
import re
import signal

import pytest

from tests.cluster.halted import HALTING, Halted
from tests.same import check_same
from tests.tools import command, program, said, until

GPT8 = ["--tp", "2", "--pp", "2", "--steps", "2"]
NOTICE = (
    "prism-record: warning: rank 0 outside communication in a signal (pause), after halting.py:10 <module>; "
    "other ranks run meanwhile\n"
)


def record(slurm, folder, world, *words, expect=0):
    """Record in an allocation of all nodes, whose number the tool finds by itself."""
    tool = command("record", "-n", world, "-j", 1, "-o", "run.h5", "--", *words)
    return slurm.run("salloc", "-Q", "-N4", "--exclusive", *tool, cwd=folder, expect=expect)


@pytest.mark.parametrize(
    ("name", "world", "arguments", "word"),
    [("gpt.py", 8, GPT8, "loss"), ("large.py", 4, [], "check")],
)
def test_the_same_as_on_one_machine(name, world, arguments, word, slurm, stages, tmp_path):
    done = record(slurm, tmp_path, world, program(name), *arguments)
    alone = stages.recorded(name, *arguments, world=world)
    assert said(done.stdout, word) == alone.lines(word) != []
    assert done.stderr == ""
    check_same(tmp_path / "run.h5", alone.path)


def test_the_table_of_a_deadlock(slurm, bench, tmp_path):
    words = ["-n", 4, "-j", 1, "-o", "run.h5", "--", program("deadlock.py")]
    alone = bench.run("record", *words, expect=1)
    there = record(slurm, tmp_path, 4, program("deadlock.py"), expect=1)
    first, second = (re.sub(r" +", " ", re.sub(r"\d+\.\d s", "T", done.stderr)) for done in (alone, there))
    assert first == second and "deadlock: no rank can run" in first


def test_a_rank_that_is_killed(slurm, tmp_path):
    done = record(slurm, tmp_path, 4, program("suicide.py"), expect=128 + signal.SIGKILL)
    assert done.stderr.splitlines()[0] == "prism-record: rank 1 on node n2 was killed by SIGKILL"


def test_where_there_is_no_allocation_or_one_too_small(slurm, tmp_path):
    tool = command("record", "-n", 4, "--nodes", 4, "-o", "run.h5", "--", program("large.py"))
    done = slurm.run(*tool, cwd=tmp_path, expect=2)
    assert done.stderr == (
        "prism-record: --nodes 4: this is no Slurm allocation; get one: salloc --nodes=4\n"
    ) and not list(tmp_path.iterdir())
    done = slurm.run("salloc", "-Q", "--nodes=2", *tool, cwd=tmp_path, expect=2)
    problem = "more than the 2 of this allocation; get one of as many: salloc --nodes=4"
    assert done.stderr == f"prism-record: --nodes 4: {problem}\n" and not list(tmp_path.iterdir())


@pytest.fixture
def halted(slurm, tmp_path):
    recording = Halted(slurm, tmp_path, "record", "-n", 4, "-o", "run.h5", "--", HALTING)
    yield recording
    recording.salloc.kill()
    recording.salloc.communicate()


def test_a_sleeping_rank_is_named_and_an_agent_killed(halted):
    assert halted.salloc.stderr.readline() == NOTICE
    os.kill(halted.process("capture.agent", "n3"), signal.SIGKILL)
    done = halted.finish()
    lines = [line for line in done.stderr.splitlines() if line.startswith("prism-record")]
    assert (done.status, lines) == (1, ["prism-record: node n3: its agent is gone; rank 2 ran there"])


def test_the_coordinator_is_killed(halted):
    os.kill(halted.process("bin/prism-record"), signal.SIGKILL)
    assert halted.finish().status == 128 + signal.SIGKILL


def test_the_coordinator_is_asked_to_stop(halted):
    os.kill(halted.process("bin/prism-record"), signal.SIGTERM)
    done = halted.finish()
    assert done.status == 128 + signal.SIGTERM and done.stderr in ("", NOTICE)  # if it was asked after more than 5 s


@pytest.mark.parametrize(("first", "number"), [("b'srun", signal.SIGTERM), ("b'/", signal.SIGINT)])
def test_the_coordinator_is_asked_to_stop_while_agents_start(first, number, slurm, tmp_path):
    """When srun, or the first agent's Python, is there: what has begun ends, without a word of it or of Slurm."""
    starting = Halted(slurm, tmp_path, "record", "-n", 4, "-o", "run.h5", "--", HALTING, ready=False)
    until(lambda: any(first in line for line in starting.running("capture.agent")))
    os.kill(starting.process("bin/prism-record"), number)
    done = starting.finish()
    assert (done.status, done.stderr) == (128 + number, "")
