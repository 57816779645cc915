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
from dataclasses import dataclass, field

import numpy as np

from prism_tools.capture import ranks

TIME_LINE = re.compile(r"^time rank (\d+) step (\d+) (\S+)$", re.MULTILINE)
LIMIT = 300  # seconds without a line of output


@dataclass
class Run:
    """`step_ms[rank, step]` by the program's own timer; CPU seconds of all ranks and elapsed seconds from the end of
    step `warmup` - 1 to the end of the last step."""

    step_ms: np.ndarray
    cpu_s: float = 0.0
    elapsed_s: float = 0.0
    load: tuple[float, ...] = field(default_factory=os.getloadavg)

    def cpu_share(self):
        """Share of all cores that the ranks used."""
        return self.cpu_s / (self.elapsed_s * os.cpu_count())


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
    """Read the ranks' output, and their CPU clocks when the last rank has ended step warmup - 1 and the last step."""
    text, marks, wanted = "", [], [warmup - 1, steps - 1]
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
                marks.append((time.monotonic(), sum(map(cpu_clock, children))))
    for rank, child in enumerate(children):
        if code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            raise RuntimeError(f"rank {rank} of the real run ended with status {code}")
    (began, before), (ended, after) = marks
    return Run(step_times(text, world_size, steps), after - before, ended - began)


def cpu_clock(pid):
    """CPU seconds of all threads of a child that has not been waited for."""
    return time.clock_gettime((~pid << 3) | 2)  # Linux's CLOCK_PROCESS_CPUTIME_ID of another process
