"""The job scripts in slurm/, submitted to real daemons."""

import re
import sys

from prism_tools.graph import file
from tests.tools import ROOT, SUMS, until

PIPELINE = ROOT / "slurm" / "pipeline.sh"


def state(slurm, job):
    """States of a job, of all its tasks if it is an array."""
    return set(re.findall(r"JobState=(\w+)", slurm.run("scontrol", "-o", "show", "job", job).stdout))


def submitted(done):
    """Name -> id of the jobs that pipeline.sh printed, in order."""
    return dict(line.split() for line in done.stdout.splitlines())


PAIRS = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
mine = [dist.new_group([k, k + 1]) for k in (0, 2, 4)][dist.get_rank() // 2]
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
for _ in range(3):
    total = torch.full((3,), float(dist.get_rank()))
    dist.all_reduce(total, group=mine)
    dist.all_reduce(total)
    optimizer.step()
if dist.get_rank() == 0:
    print(f"check rank 0 total {total.tolist()}")
dist.destroy_process_group()
"""


def test_the_pipeline(slurm, tmp_path):
    """Six ranks, measured three at a time, in pairs that stay together: three slices, and not two."""
    run = tmp_path / "run %j 1"  # Slurm would put a number there
    (tmp_path / "pairs.py").write_text(PAIRS)
    done = slurm.run(PIPELINE, run, 6, 3, "0-1", "--", tmp_path / "pairs.py")
    jobs = submitted(done)
    assert list(jobs) == ["record", "slices", "calibrate", "replay"]
    slurm.run("srun", "-Q", f"--dependency=afterany:{jobs['replay']}", "true")
    logs = {path.name: path.read_text() for path in sorted(run.glob("*.out"))}
    assert {job: state(slurm, job) for job in jobs.values()} == {job: {"COMPLETED"} for job in jobs.values()}, logs
    assert logs[f"prism-record-{jobs['record']}.out"] == "check rank 0 total [30.0, 30.0, 30.0]\n"
    calibrated, replayed = (file.read(run / f"{name}.h5") for name in ("calibrated", "replayed"))
    assert calibrated.timing.rank.tolist() == list(range(6)) and len(calibrated.probes.op) >= 1
    assert calibrated.timing.slice.tolist() == [0, 0, 1, 1, 2, 2]
    assert replayed.replay.timing.rank.tolist() == [0, 1]
    assert calibrated.environment["SLURM_JOB_ID"] == jobs["record"]
    assert {path.name for path in run.iterdir() if path.suffix == ".h5"} == {
        "bare.h5", "calibrated.h5", "replayed.h5",
    }  # fmt: skip


def test_what_depends_on_a_failed_job_is_cancelled(slurm, tmp_path):
    (tmp_path / "fails.py").write_text("raise SystemExit(3)\n")
    jobs = submitted(slurm.run(PIPELINE, "run", 4, 2, "0", "--", "fails.py", cwd=tmp_path))
    until(lambda: all(state(slurm, job) <= {"FAILED", "CANCELLED"} for job in jobs.values()))
    assert [state(slurm, job) for job in jobs.values()] == [{"FAILED"}, *[{"CANCELLED"}] * 3]
    assert list((tmp_path / "run" / "slices").iterdir()) == []


def test_all_jobs_or_none(slurm, tmp_path):
    """Slurm takes no array of 3,000 tasks: the recording, submitted already, is cancelled, and the call may be repeated."""
    for _ in range(2):
        done = slurm.run(PIPELINE, "run", 3000, 1, "0", "--", sys.executable, cwd=tmp_path, expect=1)
        jobs = submitted(done)
        assert done.stderr == "sbatch: error: Batch job submission failed: Invalid job array specification\n"
        assert list(jobs) == ["record"]
        until(lambda job=jobs["record"]: state(slurm, job) == {"CANCELLED"})  # COMPLETING first, if it had begun


def test_a_run_is_not_mixed_with_another(slurm, tmp_path):
    (tmp_path / "run" / "slices").mkdir(parents=True)
    done = slurm.run(PIPELINE, "run", 4, 2, "0", "--", SUMS, cwd=tmp_path, expect=1)
    assert (done.stdout, done.stderr) == ("", "pipeline.sh: run: holds slices already; name another folder\n")


def test_wrong_calls(slurm, tmp_path):
    usage = "usage: pipeline.sh FOLDER W S RANKS -- [-m] program [argument ...]"
    assert slurm.run(PIPELINE, "run", 4, 2, cwd=tmp_path, expect=2).stderr.splitlines()[0] == usage
    for world, ranks, name, problem in (
        ("x", "0", "a.py", "'x' is no whole number >= 1"),
        (4, "0-x", SUMS, "'0-x' is no list of ranks such as 0-3,8"),
        (4, "0,4", SUMS, "no rank 4 (there are 0-3)"),
        (4, "0", "a.py", "a.py: no such program; give a Python script, or -m module"),
    ):
        done = slurm.run(PIPELINE, "run", world, 2, ranks, "--", name, cwd=tmp_path, expect=2)
        assert done.stderr == f"pipeline.sh: {problem}\n" and list(tmp_path.iterdir()) == []
