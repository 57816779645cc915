"""A tool that stands still on the nodes of an allocation until a test ends it, or a part of it."""

import contextlib
import os
import subprocess
import sys
import uuid
from pathlib import Path

from tests.tools import LIMIT, MARK, Result, command, marked, until

HALTING = Path(__file__).parents[1] / "faults" / "halting.py"
OURS = (f"b'{sys.executable}", "b'srun")


class Halted:
    """A tool over four nodes whose program is HALTING: its rank 0 waits for good, and is waited for if ``ready``. The
    allocation outlives the tool."""

    def __init__(self, slurm, folder, tool, *arguments, ready=True):
        os.mkfifo(folder / "gate")
        self.mark, words = uuid.uuid4().hex, command(tool, *arguments)
        self.salloc = subprocess.Popen(
            ["salloc", "-Q", "-N4", "--exclusive", "sh", "-c", '"$@"; echo status $?; cat', "sh", *words],
            cwd=folder,
            env=slurm.variables(**{MARK: self.mark}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        if ready:
            self._wait(folder)

    @staticmethod
    def _wait(folder):
        gate = os.open(folder / "gate", os.O_RDONLY | os.O_NONBLOCK)  # a tool that has failed opens it never
        until(lambda: _heard(gate) == b"ready\n")
        os.close(gate)

    def running(self, words=""):
        """Command lines of the tool, its srun, agents and ranks; not of what this test began with."""
        return [line for line in marked(self.mark) if line.split(maxsplit=1)[1].startswith(OURS) and words in line]

    def process(self, words, node=""):
        """The process with these words, on a node: the oldest, from which ranks are forked. Numbers begin anew now and then."""
        here, begun = f"SLURMD_NODENAME={node}".encode(), []
        for pid in [int(line.split()[0]) for line in self.running(words) if "b'srun" not in line]:
            with contextlib.suppress(OSError):  # ended meanwhile
                if not node or here in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                    begun.append((int(fields[19]), pid))
        return min(begun)[1]

    def finish(self):
        """What the tool said, once nothing of it runs any more, though the allocation is still there."""
        said_status = self.salloc.stdout.readline()
        until(lambda: not self.running())
        out, err = self.salloc.communicate(timeout=LIMIT)
        return Result(int(said_status.split()[1]), out, err)


def _heard(pipe):
    with contextlib.suppress(BlockingIOError):
        return os.read(pipe, 100)
