"""prism-slice --slurm and prism-replay --slurm: what they submit, wait for, take up again and cancel, on real daemons."""

import re
import signal
import time

import pytest

from prism_tools.graph import file
from prism_tools.graph.check import check
from tests.cluster.gate import Gate
from tests.tools import SUMS, command, until


@pytest.fixture
def gate(slurm, tmp_path, stages):
    return Gate(slurm, tmp_path, stages)


def kept(folder):
    """Names in the one folder of parts."""
    (parts,) = folder.glob("*.parts")
    return {path.name for path in parts.iterdir()}


def test_slices_and_a_replay(slurm, sums, tmp_path):
    argv = [sums["bare"], "-s", 2, "-o", "sliced.h5", "--slurm", "--slurm-args=--comment='two words' --cpus-per-task=2"]
    done = slurm.run(*command("slice", *argv), cwd=tmp_path)
    assert done.stdout == ""
    said = re.sub(r"\bjob \d+", "job J", done.stderr).splitlines()
    assert said[0] == "prism-slice: submitted slice-0, slice-1, probe as job J"
    assert {f"prism-slice: {name}: done (job J_{k})" for k, name in enumerate(["slice-0", "slice-1", "probe"])} <= set(
        said
    )
    sliced = file.read(tmp_path / "sliced.h5")
    assert check(sliced) == [] and sliced.stage == "sliced"
    assert sliced.timing.rank.tolist() == [0, 1, 2, 3] and sliced.timing.slice.tolist() == [0, 0, 1, 1]
    assert len(sliced.probes.op) >= 2
    assert [row["tool"] for row in sliced.provenance] == ["prism-record", *["prism-slice"] * 3]
    (job,) = set(re.findall(r"as job (\d+)", done.stderr))
    told = slurm.run("scontrol", "-o", "show", "job", f"{job}_0").stdout
    assert "Comment=two words" in told and "CPUs/Task=2" in told and "Requeue=1" in told and "NumNodes=2" in told
    slurm.run(*command("calibrate", "sliced.h5", "-o", "calibrated.h5"), cwd=tmp_path)
    argv = ["-r", "0-1", "calibrated.h5", "-o", "replayed.h5", "--slurm"]
    kinds = {"SLURM_JOB_ID": "6", "SLURM_JOB_ID_HET_GROUP_0": "6", "SLURM_HET_SIZE": "2"}  # a job that the tool runs in
    done = slurm.run(*command("replay", *argv), cwd=tmp_path, **kinds)
    assert "prism-replay: replay: done" in done.stderr
    replayed = file.read(tmp_path / "replayed.h5")
    assert replayed.replay.timing.rank.tolist() == [0, 1] and replayed.stage == "replayed"
    assert (tmp_path / replayed.payload.path).exists()
    assert {path.name for path in tmp_path.iterdir()} == {"sliced.h5", "calibrated.h5", "replayed.h5"}


def test_nodes_of_two_kinds(slurm, sums, tmp_path):
    """A job for each slice, of two components: the second has the ranks, and another partition."""
    arguments = "--slurm-args=--nodelist=n1 : --partition=urgent --nodelist=n2"
    argv = [sums["bare"], "-s", 2, "--ranks", "0", "-o", "sliced.h5", "--slurm", "--no-probe", arguments]
    array = {"SLURM_JOB_ID": "6", "SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "7"}  # that the tool runs in
    done = slurm.run(*command("slice", *argv), cwd=tmp_path, **array)
    (job,) = re.findall(r"prism-slice: submitted slice-0 as job (\d+)\n", done.stderr)
    assert f"slice-0: done (job {job})" in done.stderr
    told = slurm.run("scontrol", "-o", "show", "job", job).stdout.splitlines()
    assert [re.search(r"Partition=(\w+) .* NodeList=(\w+) ", line).groups() for line in told] == [
        ("main", "n1"), ("urgent", "n2"),
    ]  # fmt: skip
    first = int(file.read(tmp_path / "sliced.h5").timing.host_issue[0][0])
    assert (first > time.monotonic_ns()) == (slurm.ahead > 0)  # n2's clock


def test_what_sbatch_refuses(slurm, sums, tmp_path):
    for arguments, problem in (
        ("--partition=nope", "Batch job submission failed: Invalid partition name specified"),
        ("--nosuch", "unrecognized option '--nosuch'"),
    ):
        argv = [sums["bare"], "-s", 2, "-o", "sliced.h5", "--slurm", f"--slurm-args={arguments}"]
        done = slurm.run(*command("slice", *argv), cwd=tmp_path, expect=1)
        assert done.stderr == f"prism-slice: sbatch: {problem}; give what the site asks for with --slurm-args=...\n"
        assert list(tmp_path.iterdir()) == []


def test_why_jobs_wait(gate):
    """Told with the user's own filters and questions in the environment, which Ctrl-C then does not heed either."""
    own = {"SQUEUE_PARTITION": "urgent", "SCANCEL_INTERACTIVE": "1", "SBATCH_WAIT": "1"}
    driver = gate.start(options=["--slurm-args=--hold"], **own)
    while "pending (JobHeldUser)" not in (line := driver.stderr.readline()):
        assert line, driver.wait()
    assert line == "prism-slice: 0/2 over, 0 running, 2 pending (JobHeldUser)\n"
    driver.send_signal(signal.SIGINT)
    assert gate.finish(driver) == 130
    until(lambda: gate.states() == {"CANCELLED"})


def test_a_failure_costs_only_its_slice(slurm, sums, tmp_path):
    """A program that fails on rank 3, then one that does not, under the same name."""
    good = SUMS.read_text()
    (tmp_path / "p.py").write_text(good.replace("for _", "1 / (3 - dist.get_rank())\nfor _", 1))
    argv = [
        "run",
        sums["bare"],
        "-s",
        2,
        "-o",
        "sliced.h5",
        "--slurm",
        "--nodes",
        1,
        "--no-probe",
        "--",
        tmp_path / "p.py",
    ]
    done = slurm.run(*command("slice", *argv), cwd=tmp_path, expect=1)
    last = done.stderr.partition("prism-slice: 1 of 2 jobs failed, first slice-1 (job ")[2]
    assert ", FAILED, " in last and "the same command makes only what is missing\n" in last, done.stderr
    assert "ZeroDivisionError" in last, done.stderr
    assert {"slice-0.h5"} == {name for name in kept(tmp_path) if name.endswith(".h5")}
    (tmp_path / "p.py").write_text(good)
    done = slurm.run(*command("slice", *argv), cwd=tmp_path)
    assert "prism-slice: 1 of 2 parts are there already\nprism-slice: submitted slice-1 as job" in done.stderr
    assert file.read(tmp_path / "sliced.h5").timing.slice.tolist() == [0, 0, 1, 1]


def test_interrupted(gate):
    """Ctrl-C cancels the jobs, and nothing of theirs is left but their logs."""
    driver = gate.start()
    gate.arrived(2)
    driver.send_signal(signal.SIGINT)
    assert gate.finish(driver) == 130
    until(lambda: gate.states() == {"CANCELLED"})
    until(lambda: gate.ranks() == [])
    assert not [name for name in kept(gate.folder) if name.endswith((".h5", ".tmp"))]


def test_killed_and_hung_up(gate):
    """A killed driver, and one whose terminal goes away, leave the jobs to the next call; two at a time are refused."""
    first = gate.start()
    gate.arrived(2)
    assert gate.refused().endswith("the same command is running; wait for it\n")
    first.kill()
    first.wait()
    second = gate.start()
    taken = "jobs of an earlier call go on, as it submitted them, with slice-0, slice-1"
    assert second.stderr.readline() == f"prism-slice: {taken}\n"
    second.send_signal(signal.SIGHUP)
    assert gate.finish(second) == 129
    assert (
        "warning: the jobs of 2 parts go on; the same command takes them up, scancel --name=prism-slice-" in gate.said
    )
    third = gate.start()
    gate.open()
    assert gate.finish(third) == 0, gate.said
    assert "submitted" not in gate.said and gate.sliced() == [0, 0, 1, 1]
