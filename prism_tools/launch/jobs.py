"""Work kept as files in a folder, of which only those that are not there are made; by Slurm, for which the caller waits."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prism_tools.errors import PrismError
from prism_tools.launch.slurm import client

if TYPE_CHECKING:
    from prism_tools.launch.submit import Job

POLL = 0.5  # seconds between looks at the folder
LAG = 60.0  # seconds after a job's end until its file is seen through a network's file system
LIST = "jobs.tsv"  # in the folder: job, name of the part
SHOWN = 5  # lines of a failed job's log


def check(file: str, output: str, arguments: Sequence[str]) -> None:
    """PrismError unless there is a Slurm, and the graph comes from a file and goes to one: both are seen by other nodes."""
    if arguments.count(":") > 1:
        raise PrismError(
            "--slurm-args: one ':' divides the assistant's options from the ranks'; leave the others out", status=2
        )
    if shutil.which("sbatch") is None:
        raise PrismError("--slurm: no sbatch on PATH; run this where Slurm's commands are, or leave --slurm out")
    for name, what in (
        (file, "the jobs read the graph; name its FILE"),
        (output, "parts are kept beside it; add -o FILE"),
    ):
        if name == "-":
            raise PrismError(f"--slurm: {what}", status=2)
    if os.path.exists(output) and not os.path.isfile(output):
        raise PrismError(f"--slurm: {output}: is no file, and parts are kept beside it; write -o elsewhere", status=2)
    if clash := set("%\\") & set(os.path.abspath(output)):
        raise PrismError(
            f"--slurm: {output}: Slurm replaces {clash.pop()} in names of files; write -o elsewhere", status=2
        )


@contextlib.contextmanager
def parts(tool: str, file: str, output: str, words: Sequence[Any], anew: bool = False) -> Iterator[Path]:
    """The folder beside ``output`` for the parts of what ``words`` (JSON) ask ``tool`` to make of the graph ``file``.

    The same question finds the same folder again, with what is done already (none of it if ``anew``). Removed if the body
    succeeds, or if nothing was submitted or made. PrismError: somebody is at work in it.
    """
    target = os.path.abspath(output)
    with open(file, "rb") as stream:
        digest = hashlib.file_digest(stream, "sha256")
    digest.update(json.dumps([target, *words]).encode())
    folder = Path(f"{target}.{tool}-{digest.hexdigest()[:12]}.parts")
    folder.mkdir(mode=0o700, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise PrismError(f"{folder}: the same command is running; wait for it") from None
        for path in folder.glob("*.h5") if anew else ():
            path.unlink()
        try:
            yield folder
        except BaseException:
            if not (folder / LIST).exists() and not any(folder.glob("*.h5")):
                shutil.rmtree(folder, ignore_errors=True)
            raise
    shutil.rmtree(folder, ignore_errors=True)  # after the lock is closed: a network's file system keeps what is open


class Parts:
    """Has Slurm make ``folder``/NAME.h5 for each name in ``commands`` (name -> the command line that makes it), by jobs of
    ``nodes`` nodes with the site's ``arguments``."""

    def __init__(
        self, folder: Path, commands: dict[str, list[str]], nodes: int, arguments: Sequence[str], progress: Any
    ) -> None:
        self.folder, self.commands, self.progress = folder, commands, progress
        self.nodes, self.arguments = nodes, arguments
        self.jobs: dict[str, Job] = {}
        self.states: dict[str, str] = {}  # as last told
        self.failed: dict[str, str] = {}  # name -> state of its job

    def path(self, name: str) -> Path:
        """Where the part is."""
        return self.folder / f"{name}.h5"

    def complete(self) -> None:
        """Return when all parts are there. PrismError when all jobs have ended and some failed.

        Ctrl-C cancels the jobs; whatever else ends this process leaves them running, for the same command to take up.
        """
        try:
            missing = [name for name in self.commands if not self.path(name).exists()]
            if found := len(self.commands) - len(missing):
                self.progress.say(f"{found} of {len(self.commands)} parts are there already")
            self._take_up(missing)
            self._submit([name for name in missing if name not in self.jobs])
            self._wait(set(missing))
        except KeyboardInterrupt:
            # By their name, which no other jobs have: those that sbatch was just about to tell of are not missed.
            subprocess.run(client("scancel", f"--user={os.getuid()}", f"--name={self._name()}"), check=False)
            raise
        except BaseException:
            if left := [name for name in self.jobs if name not in self.failed and not self.path(name).exists()]:
                remedy = f"the same command takes them up, scancel --name={self._name()} ends them"
                self.progress.warn(f"the jobs of {len(left)} parts go on; {remedy}")
            raise
        if self.failed:
            raise self._failure()

    def _name(self) -> str:
        return self.folder.suffixes[-2][1:]

    def _take_up(self, missing: Sequence[str]) -> None:
        """Find the jobs of an earlier call that still run, or will."""
        from prism_tools.launch.submit import Job

        path = self.folder / LIST
        lines = path.read_text().splitlines() if path.exists() else []
        listed = [fields for line in lines if len(fields := line.split("\t")) == 2]  # the last may be torn, by a kill
        jobs = [(name, Job(folder=self.folder, job_id=job_id)) for job_id, name in listed if name in missing]
        Job.watcher.update()  # of all of them at once
        self.jobs = {name: job for name, job in jobs if not job.watcher.is_done(job.job_id, mode="cache")}
        if self.jobs:
            self.progress.say(f"jobs of an earlier call go on, as it submitted them, with {', '.join(self.jobs)}")

    def _submit(self, names: Sequence[str]) -> None:
        from prism_tools.launch.submit import CHUNK, Executor

        size = 1 if ":" in self.arguments else CHUNK  # jobs that one call of sbatch makes
        for first in range(0, len(names), size):
            chunk = names[first : first + size]
            executor = Executor(self.folder, self._name(), self.arguments, self.nodes)
            jobs = executor.run([self.commands[name] for name in chunk])
            self.jobs |= dict(zip(chunk, jobs, strict=True))
            with open(self.folder / LIST, "a") as stream:
                stream.writelines(f"{job.job_id}\t{name}\n" for job, name in zip(jobs, chunk, strict=True))
            self.progress.say(
                f"submitted {', '.join(chunk[:SHOWN])}{' …' * (len(chunk) > SHOWN)} as job {_array(jobs[0])}"
            )

    def _wait(self, waiting: set[str]) -> None:
        ended: dict[str, float] = {}  # name -> since when its job is known to be over
        while waiting:
            for name in [name for name in self.commands if name in waiting]:
                job = self.jobs[name]
                done = job.done()
                state = job.watcher.get_state(job.job_id, mode="cache")
                if done and self.path(name).exists():
                    self._tell(name, "done")
                elif job.watcher.is_done(job.job_id, mode="cache") and (
                    state != "COMPLETED" or time.monotonic() > ended.setdefault(name, time.monotonic()) + LAG
                ):
                    self.failed[name] = state
                    self._tell(name, state.lower())
                else:
                    self._tell(name, state.lower())
                    continue
                waiting.remove(name)
            self.progress.update(self._summary(waiting))
            if waiting:
                time.sleep(POLL)

    def _summary(self, waiting: set[str]) -> str:
        """How many are over, running and failed, and why others wait: for some there is no hope without the user."""
        total, running = len(self.commands), sum(self.states[name] == "running" for name in waiting)
        jobs = [self.jobs[name] for name in waiting if self.states[name] == "pending"]
        reasons = ", ".join(sorted({reason for job in jobs if (reason := job.watcher.reason(job.job_id))}))
        pending = f", {len(jobs)} pending ({reasons})" if reasons else ""
        failed = f", {len(self.failed)} failed" if self.failed else ""
        return f"{total - len(waiting)}/{total} over, {running} running{pending}{failed}"

    def _tell(self, name: str, state: str) -> None:
        if self.states.get(name) != state and state != "unknown":
            self.progress.say(f"{name}: {state} (job {self.jobs[name].job_id})")
        self.states[name] = state

    def _failure(self) -> PrismError:
        name = next(name for name in self.commands if name in self.failed)
        job, state = self.jobs[name], self.failed[name]
        log = job.paths.stderr
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        told = [line for line in lines if not line.startswith(("submitit ", "slurmstepd"))]
        count = f"{len(self.failed)} of {len(self.commands)} jobs failed, first {name}"
        remedy = "the same command makes only what is missing"
        return PrismError(f"{count} (job {job.job_id}, {state}, {log}); {remedy}", detail="\n".join(told[-SHOWN:]))


def _array(job: Job) -> str:
    return job.job_id.partition("_")[0]
