"""The job itself, for comparison: W forked processes, a real TCPStore, real gloo, the program unmodified, no capture."""

import contextlib
import ctypes
import os
import re
import runpy
import selectors
import signal
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from prism_tools.capture import ranks

TIME_LINE = re.compile(r"^time rank (\d+) step (\d+) (\S+)$", re.MULTILINE)
LIMIT = 300  # seconds without a line of output


@dataclass
class Run:
    """`step_ms[rank, step]` by the program's own timer. From the end of step `warmup` - 1 to the end of the last but one:
    seconds that all ranks ran, seconds that all ranks were ready and had no core, and seconds elapsed."""

    step_ms: np.ndarray
    cpu_s: float
    queued_s: float
    elapsed_s: float

    def cpu_share(self):
        """Share of all cores that the ranks used."""
        return self.cpu_s / (self.elapsed_s * os.cpu_count())

    def queued_share(self):
        """Share of the time that a rank was ready to run and had no core, mean over ranks."""
        return self.queued_s / (self.elapsed_s * len(self.step_ms))


def step_times(text, world_size, steps):
    """ms[world_size, steps] of the program's `time rank R step K MS` lines; NaN where there is none."""
    times = np.full((world_size, steps), np.nan)
    for rank, step, ms in TIME_LINE.findall(text):
        times[int(rank), int(step)] = float(ms)
    return times


def run_real(command, world_size, steps, warmup):
    """Run `command` (program and arguments) on `world_size` ranks to its end. RuntimeError if a rank fails."""
    ranks.preload()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    reading, writing = os.pipe()
    children = [_fork(command, rank, world_size, port, reading, writing) for rank in range(world_size)]
    os.close(writing)
    try:
        return _watch(children, reading, world_size, steps, warmup)
    finally:
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, 0)
        os.close(reading)


def _fork(command, rank, world_size, port, reading, writing):
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        ctypes.CDLL(None).prctl(ranks.PR_SET_PDEATHSIG, signal.SIGKILL)
        os.close(reading)
        os.dup2(writing, 1)
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0"}
        os.environ |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        sys.argv = list(command)
        sys.path.insert(0, os.path.dirname(os.path.abspath(command[0])))
        runpy.run_path(command[0], run_name="__main__")
        sys.stdout.flush()
        status = 0
    finally:
        if status:
            sys.excepthook(*sys.exc_info())
        os._exit(status)


def _watch(children, reading, world_size, steps, warmup):
    """Read the ranks' output, and what they have used when all have ended step warmup - 1, and the last step but one:
    after the last they go away."""
    text, marks, wanted = "", [], [warmup - 1, steps - 2]
    with selectors.DefaultSelector() as selector:
        selector.register(reading, selectors.EVENT_READ)
        while True:
            if not selector.select(LIMIT):
                raise RuntimeError(f"the real run has been silent for {LIMIT} s")
            data = os.read(reading, 1 << 16)
            if not data:
                break
            text += data.decode()
            times = step_times(text, world_size, steps)
            while len(marks) < 2 and not np.isnan(times[:, wanted[len(marks)]]).any():
                marks.append(np.array([*np.sum([usage(child) for child in children], axis=0), time.monotonic()]))
    for rank, child in enumerate(children):
        if code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            raise RuntimeError(f"rank {rank} of the real run ended with status {code}")
    return Run(step_times(text, world_size, steps), *(marks[1] - marks[0]).tolist())


def usage(pid):
    """(seconds run, seconds waited for a core) of the threads of a child. Threads that have ended are not counted."""
    ran = queued = 0
    for stat in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):  # the thread has just ended
            numbers = stat.read_text().split()
            ran, queued = ran + int(numbers[0]), queued + int(numbers[1])
    return ran / 1e9, queued / 1e9
