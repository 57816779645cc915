"""Under prism-record every program computes what it computes under real gloo, bit for bit, however many ranks run at a time."""

import subprocess
import sys
from itertools import groupby

import pytest

from prism_tools.graph import file
from prism_tools.graph.schema import ReduceOrder
from tests.tools import environment, program, said

GPT_CASES = {
    "W4": (4, ["--pp", "2"]),
    "W8": (8, ["--tp", "2", "--pp", "2"]),
    "W8-experts": (8, ["--tp", "2", "--pp", "2", "--ep", "2", "--moe", "4"]),
}
STEPS = 4


@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.parametrize("case", GPT_CASES)
def test_losses_of_gpt(case, jobs, real, stages):
    world, arguments = GPT_CASES[case]
    expected = said(real.output("gpt.py", *arguments, world=world), "loss")
    assert len(expected) == STEPS * world // 2  # the ranks of the last of two stages
    recorded = stages.recorded("gpt.py", *arguments, world=world, jobs=jobs)
    assert recorded.lines("loss") == expected
    assert recorded.stderr == ""


def test_the_reference_is_what_torchrun_gives(real, tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    done = subprocess.run(
        [*torchrun, program("gpt.py"), "--pp", "2"],
        cwd=tmp_path,
        env=environment(OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    expected = said(done.stdout, "loss")
    assert len(expected) == STEPS * 2
    assert said(real.output("gpt.py", "--pp", "2", world=4), "loss") == expected


def test_every_operation(real, stages):
    """Their sums are of small whole numbers, exact in any order: equal bits also where more than two addends meet."""
    expected = said(real.output("collectives.py", world=4), "check")
    names = {line.split()[3] for line in expected}
    assert len(names) >= 48 and len(expected) == 4 * len(names)
    assert stages.recorded("collectives.py", world=4).lines("check") == expected


# In each of these no sum has more than two addends, so that its order cannot matter.
@pytest.mark.parametrize(
    ("name", "world", "word", "lines"),
    [
        ("ddp.py", 2, "loss", 2 * 8),
        ("fsdp2.py", 4, "loss", 4 * 4),
        ("moe.py", 4, "loss", 4 * 4),
        ("moe.py", 4, "check", 4),
        ("pipeline.py", 4, "loss", 2 * 3),
        ("store.py", 4, "check", 4 * 12),
        ("no_marks.py", 4, "check", 4 * 6),
    ],
)
def test_programs(name, world, word, lines, real, stages):
    expected = said(real.output(name, world=world), word)
    assert len(expected) == lines
    assert stages.recorded(name, world=world).lines(word) == expected


def test_sums_of_four(real, stages):
    """Four gradients meet in each of ddp.py's sums: the ring's order gives other last bits than the ranks' order."""

    def losses(lines):
        rows = [line.split() for line in lines]
        return {(row[2], row[4]): float.fromhex(row[5]) for row in rows}

    expected = losses(said(real.output("ddp.py", world=4), "loss"))
    found = losses(stages.recorded("ddp.py", world=4).lines("loss"))
    assert len(expected) == 4 * 4
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        # Before the first step nothing has been summed; then one unit in the last place a step, grown by the model.
        assert found[key] == pytest.approx(value, rel=0 if key[1] == "0" else 2e-6, abs=0)


@pytest.mark.parametrize(
    ("name", "world", "word", "lines"),
    [
        ("ddp.py", 4, "loss", 4 * 4),
        ("ddp.py", 8, "loss", 8 * 2),
        ("fsdp2.py", 8, "loss", 8 * 4),
        ("float_sums.py", 3, "check", 3 * 86 + 18),
    ],
)
def test_sums_of_many_in_gloo_s_order(name, world, word, lines, real, stages):
    """Equal bits whatever the number of addends."""
    expected = said(real.output(name, world=world), word)
    assert len(expected) == lines
    made = stages.recorded(name, world=world, options=("--reduce-order", "ring"))
    assert made.lines(word) == expected
    assert file.read(made.path).launch.reduce_order is ReduceOrder.RING


def test_ranks_of_a_program_that_prints_nothing_else_stay_in_order(stages):
    """What a rank prints comes in its own order, whatever the others do."""
    made = stages.recorded("gpt.py", "--pp", "2", world=4)
    rows = [line.split() for line in made.stdout.splitlines() if line.startswith("time rank ")]
    for _, mine in groupby(sorted(rows, key=lambda row: row[2]), key=lambda row: row[2]):
        assert [row[4] for row in mine] == ["0", "1", "2", "3"]
