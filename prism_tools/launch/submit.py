"""Commands as jobs of Slurm, through submitit: what it leaves open for them is mended here. The only importer of submitit."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from submitit.core import utils
from submitit.helpers import Checkpointable
from submitit.slurm import slurm

from prism_tools.errors import PrismError
from prism_tools.launch.slurm import client

GONE = "GONE"  # the queue knows it no more
ENDED = {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "OUT_OF_MEMORY", "REVOKED", "TIMEOUT", GONE}
CHUNK = 500  # tasks of one array: Slurm's default limit is 1,000
PREEMPTIONS = 5  # USR2 requeues a job this often; more look like a site that sends it at the time limit
UNLIMITED = 1 << 30  # minutes; submitit asks for no time, so it must not judge by one either
HELP = 'Try "sbatch'  # what sbatch says after its complaint
ASK_EVERY = 10  # seconds between two questions to Slurm; sooner while jobs are young

for _handler in list(logging.getLogger("submitit").handlers):  # standard output is for the graph
    if getattr(_handler, "stream", None) is sys.stdout:
        logging.getLogger("submitit").removeHandler(_handler)


def components(arguments: Sequence[str]) -> list[list[str]]:
    """Options of sbatch, divided where a ":" begins those of a heterogeneous job's next component."""
    divided: list[list[str]] = [[]]
    for word in arguments:
        if word == ":":
            divided.append([])
        else:
            divided[-1].append(word)
    return divided


class Watcher(slurm.SlurmInfoWatcher):
    """States from the queue: submitit asks sacct, which sites without an accounting database do not have.

    PREEMPTED and NODE_FAIL may still be requeued, so they are no end; where they are one, the job is GONE minutes later.
    """

    def reason(self, job_id: str) -> str:
        """Why a job waits, as squeue has it, such as "Resources"; "" if it is not known."""
        return self._info_dict.get(job_id, {}).get("Reason", "").removeprefix("None")

    def _make_command(self) -> list[str] | None:
        fields = ["--array", "--noheader", "--format=%i|%T|%r"]  # --array: one line for each task, pending ones too
        asked = client("squeue", f"--user={os.getuid()}", "--states=all", *fields)
        return asked if self._registered - self._finished else None

    def read_info(self, string: bytes | str) -> dict[str, dict[str, str]]:
        """Job -> its state, from what squeue printed. A heterogeneous job is its first component, "12+0": the script's."""
        text = string if isinstance(string, str) else string.decode()
        rows = [[field.strip() for field in line.split("|")] for line in text.splitlines()]
        told = [(row[0].removesuffix("+0"), *row[1:]) for row in rows if len(row) == 3]
        found = {job: {"JobID": job, "State": state, "Reason": reason} for job, state, reason in told}
        return {job: {"JobID": job, "State": GONE} for job in self._registered} | found

    def is_done(self, job_id: str, mode: str = "standard") -> bool:
        """Whether the job has ended and will not be requeued; submitit takes a suspended one for ended."""
        return self.get_state(job_id, mode) in ENDED


class Job(slurm.SlurmJob[None]):
    """A task of an array, or a heterogeneous job."""

    watcher = Watcher(delay_s=ASK_EVERY)


class Command(Checkpointable):
    """A command line, run as a child of the job's Python; the job ends with its exit status."""

    def __init__(self, argv: Sequence[str]) -> None:
        self.argv = list(argv)

    def __call__(self) -> None:
        """SystemExit, not an exception, where the command fails: a job that Slurm requeues leaves no result behind."""
        with subprocess.Popen(self.argv, stdin=subprocess.DEVNULL) as child:
            try:
                status = child.wait()
            finally:
                if child.poll() is None:  # submitit's handler of USR2 ends this Python
                    child.terminate()
        if status:
            raise SystemExit(status if status > 0 else 128 - status)

    def checkpoint(self) -> Any:
        """What submitit requeues when told, by USR2, that the job is preempted; None: it ends."""
        restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        return utils.DelayedSubmission(self) if restarts < PREEMPTIONS else None


class Executor(slurm.SlurmExecutor):
    """Submits commands as arrays of jobs of ``nodes`` nodes, whose files are in ``folder``; the script runs on the first.

    ``arguments``: the site's options of sbatch, which win. With a ":" among them, as sbatch has it, each command is a
    heterogeneous job: its script on one node, by what is before the ":", the other nodes by what is behind.
    What submitit would ask for by itself is left to the site: five minutes, a wckey, and USR2 90 s before the end, which at
    limits of two minutes comes at the beginning.
    """

    job_class = Job

    def __init__(self, folder: Path, name: str, arguments: Sequence[str], nodes: int) -> None:
        super().__init__(folder, python=f"exec {shlex.quote(sys.executable)}")  # exec: signals reach Python
        self.components = components(arguments)
        if len(self.components) > 1:
            shape = [f"--nodes={max(nodes - 1, 1)}", "--ntasks-per-node=1", "--exclusive", "--mem=0"]
            self.components[1] = [*shape, *self.components[1]]
            nodes = 1
        for words in self.components:
            words.append(f"--job-name={name}")  # the name is ours: jobs are cancelled by it
        own = {"ntasks-per-node": 1, "requeue": True}
        self.update_parameters(
            nodes=nodes, exclusive=True, mem="0", time=None, wckey=None, use_srun=False,
            additional_parameters=own,
        )  # fmt: skip

    def run(self, commands: Sequence[Sequence[str]]) -> list[Job]:
        """Submit; returns a job for each command. PrismError: what sbatch says."""
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # where submitit repeats sbatch's words
                return self.submit_array([Command(argv) for argv in commands])
        except (utils.FailedJobError, utils.FailedSubmissionError) as error:
            lines = [line for line in str(error).splitlines() if not line.startswith(HELP)] or ["refused"]
            words = lines[-1 if isinstance(error, utils.FailedJobError) else 0]
            words = words.removeprefix("sbatch: ").removeprefix("error: ")
            raise PrismError(f"sbatch: {words}; give what the site asks for with --slurm-args=...") from None
        except OSError as error:
            problem = f"cannot be written: {error.strerror or error}"
            raise PrismError(f"{self.folder}: {problem}; free some space, or write -o elsewhere") from error

    def _internal_process_submissions(self, delayed_submissions: list[utils.DelayedSubmission]) -> list[Job]:
        """As submitit's, which makes a plain SlurmExecutor for an array: without the python, the jobs' class and all of this."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if len(self.components) > 1:  # Slurm has no arrays of these
            return [self._dumped(delayed, self._submitted()) for delayed in delayed_submissions]
        self.parameters["map_count"] = len(delayed_submissions)
        first = self._submitted()
        return [self._dumped(delayed, f"{first}_{number}") for number, delayed in enumerate(delayed_submissions)]

    def _submitted(self) -> str:
        return self._submit_command(self._submitit_command_str).job_id

    def _dumped(self, delayed: utils.DelayedSubmission, job_id: str) -> Job:
        delayed.set_timeout(UNLIMITED, self.max_num_timeout)
        job = self.job_class(folder=self.folder, job_id=job_id)
        with utils.temporary_save_path(job.paths.submitted_pickle) as path:  # its job waits for it
            delayed.dump(path)
        return job

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        lines = super()._make_submission_file_text(command, uid).splitlines(keepends=True)
        return "".join(line for line in lines if not line.startswith("#SBATCH --signal="))

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        first, *others = self.components
        return client(
            "sbatch", *first, *(word for words in others for word in (":", *words)), str(submission_file_path)
        )

    def _num_tasks(self) -> int:
        return 1
