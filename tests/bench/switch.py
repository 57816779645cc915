"""What a context switch of prism-record costs: 64 ranks, 2 at a time, with and without 1,000 extra all-reduces each.

Every rank blocks once in every all-reduce, so the extra time is that of 64,000 switches with everything that goes with them:
tracing, messages, payloads and the graph. Read it beside a plain ping-pong over a Unix socket in the same run.
"""

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from figures import figure, progress

ROOT = Path(__file__).resolve().parents[2]
WORLD_SIZE, JOBS, EXTRA, FEW = 64, 2, 1000, 4
GOAL_US = 100.0
ROUNDS = 20_000
PROGRAM = """
import sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
one = torch.ones(1)
for _ in range(int(sys.argv[1])):
    dist.all_reduce(one)
dist.destroy_process_group()
"""


def record(folder, world_size, extra, profile=False):
    """Seconds of one prism-record of the program with `extra` all-reduces; `profile`: print where they go on stderr."""
    program = folder / "program.py"
    program.write_text(PROGRAM)
    tool = [ROOT / "bin" / "prism-record", "-q", "-n", world_size, "-j", JOBS, "-o", folder / "graph.h5"]
    profiler = ["-m", "cProfile", "-o", folder / "profile"] if profile else []
    command = [sys.executable, *profiler, *tool, "--", program, extra]
    began = time.perf_counter()
    subprocess.run(
        list(map(str, command)), check=True, stdout=subprocess.DEVNULL, env=os.environ | {"PYTHONHASHSEED": "0"}
    )
    return time.perf_counter() - began


def show_profile(path, lines=25):
    """The functions of the coordinator that took most time themselves; profiling itself makes calls dearer."""
    import pstats

    pstats.Stats(str(path), stream=sys.stderr).sort_stats("tottime").print_stats(lines)


def ping_pong():
    """Microseconds of one round trip of a byte between two processes over a Unix socket."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    child = os.fork()
    if not child:
        ours.close()
        while data := theirs.recv(64):
            theirs.send(data)
        os._exit(0)
    theirs.close()
    began = time.perf_counter()
    for _ in range(ROUNDS):
        ours.send(b"x")
        ours.recv(64)
    elapsed = time.perf_counter() - began
    ours.close()
    os.waitpid(child, 0)
    return 1e6 * elapsed / ROUNDS


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3, help="measurements (default: 3)")
    parser.add_argument("--profile", action="store_true", help="show where the coordinator's time goes, and no figures")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if options.profile:
            record(folder, WORLD_SIZE, EXTRA, profile=True)
            show_profile(folder / "profile")
            return
        switches, starts, trips = [], [], []
        for turn in range(options.repeats):
            few, none, extra = (record(folder, n, k) for n, k in ((FEW, 0), (WORLD_SIZE, 0), (WORLD_SIZE, EXTRA)))
            switches.append(1e6 * (extra - none) / (EXTRA * WORLD_SIZE))
            starts.append(1e3 * (none - few) / (WORLD_SIZE - FEW))
            trips.append(ping_pong())
            progress(
                f"{turn + 1}/{options.repeats}: {FEW} ranks {few:.1f} s, {WORLD_SIZE} {none:.1f} s, extra {extra:.1f} s"
            )
    trip = statistics.median(trips)
    switch = statistics.median(switches)
    figure("switch of prism-record, 64 ranks, 2 at a time", switch, "us", GOAL_US, switch <= GOAL_US, trip)
    figure("spread of the switch (largest - least)", max(switches) - min(switches), "us")
    figure("start-up of a rank", statistics.median(starts), "ms")
    figure("ping-pong over a Unix socket, round trip", trip, "us")


if __name__ == "__main__":
    main()
