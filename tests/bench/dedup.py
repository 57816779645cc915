"""prism-record --dedup at scale: the example GPT (TP 8, PP 8, the rest DP) by rules: ranks run, time, bytes, and a check."""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from figures import figure, progress

ROOT = Path(__file__).resolve().parents[2]
GPT = ROOT / "share" / "prism" / "examples" / "gpt.py"
RULES = ROOT / "share" / "prism" / "rules" / "pipelining.toml"
WORLDS = (1024, 8192)
WORDS = ("--tp", 8, "--pp", 8, "--layers", 8, "--heads", 8, "--microbatches", 8, "--steps", 3)
GOAL_SECONDS, GOAL_MB = 600.0, 20.0


def run(*words):
    """(seconds, standard error) of a tool that succeeds."""
    began = time.perf_counter()
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"bench: {' '.join(command)}: status {done.returncode}\n{done.stderr}")
    return time.perf_counter() - began, done.stderr


def measure(folder, world, jobs):
    graph = folder / "graph.h5"
    options = ["-v", "-n", world, "-j", jobs, "--dedup", "--rules", RULES, "--tensors", "none", "-o", graph]
    seconds, said = run(ROOT / "bin" / "prism-record", *options, "--", GPT, *WORDS)
    ran = int(re.search(r"; ([\d,]+) of [\d,]+ ranks were run", said)[1].replace(",", ""))
    name = f"dedup, GPT, W = {world}"
    progress(f"{name}: {seconds:.0f} s")
    figure(f"{name}: ranks run", ran, "ranks")
    figure(f"{name}: time", seconds, "s", GOAL_SECONDS, seconds <= GOAL_SECONDS)
    megabytes = graph.stat().st_size / 1e6
    figure(f"{name}: graph", megabytes, "MB", GOAL_MB, megabytes <= GOAL_MB)
    figure(f"{name}: payloads that steer", graph.with_suffix(".payload").stat().st_size / 1e6, "MB")
    figure(f"{name}: prism-inspect check", run(ROOT / "bin" / "prism-inspect", "check", graph)[0], "s")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worlds", default=",".join(map(str, WORLDS)), help="sizes (default: %(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        for world in map(int, options.worlds.split(",")):
            measure(Path(scratch), world, len(os.sched_getaffinity(0)))


if __name__ == "__main__":
    main()
