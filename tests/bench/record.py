"""prism-record at scale: the example GPT at 8, 64, 256 and 1,024 ranks on the cores there are; memory of a rank, and time.

time / (CPU / cores) is 1 where no core is ever idle; CPU is that of all ranks and of the coordinator. Sizes for which there is no
memory are left out, and said. A program of nothing but all_reduces of one number tells what starting a rank and a switch cost: its
longer run has that many more switches, and its shorter one is starting but for its own. Python 3.12 and later shares more memory.
"""

import argparse
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from figures import figure, progress

ROOT = Path(__file__).resolve().parents[2]
GPT = ROOT / "share" / "prism" / "examples" / "gpt.py"
WORLDS = (8, 64, 256, 1024)
GOAL_MB = 14.0
PING = """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
value = torch.ones(1)
for _ in range(int(sys.argv[1])):
    dist.all_reduce(value)
"""
SHORT, SWITCHES = 5, 20_000  # all_reduces of the shorter run; switches that the longer one has more
GOAL_START_MS, GOAL_SWITCH_US = 10.0, 60.0
SAMPLED = 8  # ranks whose memory is read
EVERY = 0.5  # seconds between two looks
ENOUGH = 1 << 30  # bytes that a larger run must leave free


def private_bytes(pid):
    """What a process has for itself alone (Private_Clean + Private_Dirty); 0 if it is gone."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Private_"))


def children(pid):
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def available():
    """Bytes that programs can still have."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return 1024 * int(line.split()[1])
    return 0


class Watch(threading.Thread):
    """The largest private memory of the coordinator, and of a rank (the mean of SAMPLED ones), bytes, while all ranks are there:
    what few processes share would count as theirs."""

    def __init__(self, process, world):
        super().__init__(daemon=True)
        self.process, self.world = process, world
        self.rank, self.coordinator = 0.0, 0

    def run(self):
        while self.process.poll() is None:
            ranks = children(self.process.pid)
            if len(ranks) == self.world:
                found = [private_bytes(pid) for pid in ranks[:: max(1, len(ranks) // SAMPLED)]]
                self.rank = max(self.rank, statistics.mean(found))
                self.coordinator = max(self.coordinator, private_bytes(self.process.pid))
            time.sleep(EVERY)


def record(folder, world, jobs, words):
    """(seconds of the tool, CPU seconds, seconds of the ranks, switches, watch) of one recording."""
    tool = [sys.executable, ROOT / "bin" / "prism-record", "-v", "-n", world, "-j", jobs, "--tensors", "none"]
    command = [*tool, "-o", folder / "graph.h5", "--", *words]
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    process = subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    watch = Watch(process, world)
    watch.start()
    said = process.communicate()[1]
    if process.returncode:
        raise SystemExit(f"bench: {world} ranks: prism-record ended with status {process.returncode}\n{said}")
    watch.join()
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    switches, ranks_time = re.search(r"recorded: ([\d,]+) switches in ([\d.]+) s", said).groups()
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, cpu, float(ranks_time), int(switches.replace(",", "")), watch


def gpt(folder, world, jobs, steps):
    """The private memory of a rank, bytes, and the figures of the example GPT."""
    name = f"record, GPT tiny, W = {world}"
    words = [GPT, "--steps", steps, "--tp", 2, "--pp", 2]
    seconds, cpu, ranks_time, switches, watch = record(folder, world, jobs, words)
    progress(f"{name}: {seconds:.0f} s")
    figure(f"{name}: time", seconds, "s")
    figure(f"{name}: CPU of a rank", cpu / world, "s")
    figure(f"{name}: time / (CPU / cores)", seconds / (cpu / jobs), "ratio")
    figure(f"{name}: switches", switches / ranks_time, "1/s")
    megabytes = watch.rank / 1e6
    figure(f"{name}: private memory of a rank", megabytes, "MB", GOAL_MB, megabytes <= GOAL_MB)
    figure(f"{name}: private memory of the coordinator", watch.coordinator / 1e6, "MB")
    return watch.rank


def ping(folder, world, jobs):
    """What starting a rank and a switch cost."""
    (folder / "ping.py").write_text(PING)
    more = max(1, SWITCHES // world)
    shorter, longer = (record(folder, world, jobs, [folder / "ping.py", calls]) for calls in (SHORT, SHORT + more))
    switch = (longer[2] - shorter[2]) / (longer[3] - shorter[3])
    start = (shorter[2] - switch * shorter[3]) / world
    name = f"record, ping, W = {world}"
    progress(f"{name}: {shorter[0] + longer[0]:.0f} s")
    figure(f"{name}: a switch", switch * 1e6, "us", GOAL_SWITCH_US, switch * 1e6 <= GOAL_SWITCH_US)
    figure(f"{name}: start-up of a rank", start * 1e3, "ms", GOAL_START_MS, start * 1e3 <= GOAL_START_MS)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worlds", default=",".join(map(str, WORLDS)), help="sizes (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=2, help="training steps (default: 2)")
    options = parser.parse_args()
    jobs = len(os.sched_getaffinity(0))
    seen = 0.0
    with tempfile.TemporaryDirectory() as scratch:
        for world in map(int, options.worlds.split(",")):
            if seen * world > available() - ENOUGH:
                needs = f"{seen * world / 2**30:.1f} GiB are needed, {available() / 2**30:.1f} are free"
                progress(f"record, W = {world}: left out: {needs}")
                continue
            seen = max(seen, gpt(Path(scratch), world, jobs, options.steps))
            ping(Path(scratch), world, jobs)


if __name__ == "__main__":
    main()
