"""Slices that stand still at a gate until a test opens it: time to do to their jobs what clusters do."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from prism_tools.graph import file
from tests.tools import LIMIT, SUMS, command, marked, until

# A first rank writes that it is there, and reads from a pipe, which waits until somebody has it open for writing.
GATE = """
import os, sys
name = f"{sys.argv[1]}.{os.environ['RANK']}.{os.environ['SLURM_JOB_ID']}.{os.environ.get('SLURM_RESTART_COUNT', 0)}"
open(name, "w").close()
open(sys.argv[1]).read()
"""


class Gate:
    """Slices of SUMS, of two ranks each or of one, each waiting in its own job."""

    def __init__(self, slurm, folder: Path, stages) -> None:
        self.slurm, self.folder = slurm, folder
        self.pipe = folder / "gate"
        os.mkfifo(self.pipe)
        (folder / "program.py").write_text(GATE + SUMS.read_text())
        bare = stages.recorded(SUMS, world=4).path
        self.argv = ["run", bare, "-o", "sliced.h5", "--slurm", "--no-probe", "--nodes", 1]
        self.program = ["--", folder / "program.py", self.pipe]
        self.said = ""

    def start(self, size: int = 2, options: Sequence[str] = (), **more: str) -> subprocess.Popen[str]:
        """prism-slice, waiting for its jobs; ``more``: environment variables."""
        return self.start_tool("slice", *self.argv, "-s", size, *options, *self.program, **more)

    def start_tool(self, tool: str, *arguments: object, **more: str) -> subprocess.Popen[str]:
        """A tool that waits for its jobs."""
        return subprocess.Popen(
            command(tool, *arguments),
            cwd=self.folder,
            env=self.slurm.variables(**more),
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def refused(self) -> str:
        """What another prism-slice says that must fail."""
        call = command("slice", *self.argv, "-s", 2, *self.program)
        return self.slurm.run(*call, cwd=self.folder, expect=1).stderr

    def arrived(self, count: int, attempt: int = 0) -> None:
        """Wait until the first ranks of ``count`` slices stand at the gate, in their attempt number ``attempt``."""
        until(lambda: len({p.name.split(".")[2] for p in self.folder.glob(f"gate.*.*.{attempt}")}) >= count)

    def open(self) -> None:
        """Let everybody pass from now on."""
        (self.folder / "open").touch()
        ahead = os.open(self.pipe, os.O_RDWR)  # those that wait in open() go on to read
        os.replace(self.folder / "open", self.pipe)
        os.close(ahead)

    def finish(self, child: subprocess.Popen[str]) -> int:
        """Exit status; what it said is in ``said``."""
        _, self.said = child.communicate(timeout=LIMIT)
        return child.returncode

    def sliced(self) -> list[int]:
        """The slices of the measured ranks."""
        graph = file.read(self.folder / "sliced.h5")
        assert graph.timing.rank.tolist() == [0, 1, 2, 3]
        return graph.timing.slice.tolist()

    def job(self, part: str) -> str:
        """Id of the newest job that makes a part, as an array's task."""
        (path,) = self.folder.glob("*.parts/jobs.tsv")
        return {name: job for job, name in (line.split("\t") for line in path.read_text().splitlines())}[part]

    def show(self, part: str) -> str:
        """What Slurm says about it."""
        return self.slurm.run("scontrol", "-o", "show", "job", self.job(part)).stdout

    def states(self) -> set[str]:
        """Of all jobs of all calls."""
        (path,) = self.folder.glob("*.parts/jobs.tsv")
        jobs = {line.partition("_")[0] for line in path.read_text().splitlines()}
        told = [self.slurm.run("scontrol", "-o", "show", "job", job).stdout for job in jobs]
        return set(re.findall(r"JobState=(\w+)", "".join(told)))

    def ranks(self) -> list[str]:
        """Processes of the jobs' tools and their ranks, on the same node or another one."""
        return [line for line in marked(self.slurm.mark) if ".parts/" in line or "prism_tools.capture.agent" in line]

    def node(self, part: str) -> str:
        """The node of a part's ranks: the last one of its job."""
        nodes = re.search(r" NodeList=(\S+)", self.show(part))[1]
        return self.slurm.run("scontrol", "show", "hostnames", nodes).stdout.split()[-1]
