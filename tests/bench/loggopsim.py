"""Beside LogGOPSim (github.com/spcl/LogGOPSim, built with -O3; it and its txt2bin on PATH): the same schedule, exported as GOAL.

A pipeline of eager messages that take no time (L = o = g = G = 0), every span random: both must end at the same ns.
Both are timed by the processor's time, LogGOPSim with its loading, ours without compilation.
"""

import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from figures import figure, progress

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from prism_tools.calibrate import lockstep  # noqa: E402
from prism_tools.graph.classes import classes_of  # noqa: E402
from prism_tools.graph.match import find_matches  # noqa: E402
from prism_tools.graph.order import dependency_order  # noqa: E402
from prism_tools.graph.schema import Kind, Op  # noqa: E402
from tests.bench import clusters  # noqa: E402

CLUSTER = clusters.Cluster(tp=1, pp=16, dp=64, layers=2, microbatches=64, iterations=1, buckets=0)
GOAL = 50.0


def export(graph, known, path):
    """The graph in LogGOPSim's language: on each rank one operation after the other."""
    with open(path, "w") as target:
        print(f"num_ranks {graph.world_size}", file=target)
        for rank in range(graph.world_size):
            program, own = graph.program_of(rank), known.own[known.row[rank]].tolist()
            lines = [f"rank {rank} {{"]
            for node, (kind, op) in enumerate(zip(program.kind.tolist(), program.op.tolist(), strict=True)):
                if kind == Kind.COMM and op in (Op.SEND, Op.RECV):
                    members = graph.groups.members[graph.ranks.slots[rank][program.slot[node]]]
                    peer = members[(np.flatnonzero(members == rank)[0] + program.peer[node]) % len(members)]
                    what = f"send 1b to {peer} tag 0" if op == Op.SEND else f"recv 1b from {peer} tag 0"
                else:
                    what = f"calc {own[node]}"
                lines += [f"l{node}: {what}"] + [f"l{node} requires l{node - 1}"] * (node > 0)
            print("\n".join([*lines, "}"]), file=target)


def ours(graph, known):
    """The last end, seconds to solve, and seconds with classes, matches, order and layout."""
    for _ in range(2):  # the first compiles
        began = time.process_time()
        matches = find_matches(graph, classes=classes_of(graph, np.zeros(graph.world_size)))
        order = dependency_order(graph, matches)
        lanes = lockstep.lanes_of(graph, matches, order, classes_of(graph, known.row))
        gap = lockstep.gaps(graph, matches, lanes, known)
        ready = time.process_time()
        end = lockstep.ends(matches, order, lanes, gap)
        done = time.process_time()
    return int(end.max()), done - ready, done - began


def main():
    if not all(map(shutil.which, ("LogGOPSim", "txt2bin"))):
        progress("LogGOPSim and txt2bin are not on PATH: no figure")
        return
    graph = clusters.build(CLUSTER)
    known = clusters.durations(graph, np.arange(graph.world_size))
    for rank, own in enumerate(known.own):
        program = graph.program_of(rank)
        own[np.isin(program.op, (Op.SEND, Op.RECV))] = 0
    nodes = sum(map(len, known.own))
    with tempfile.TemporaryDirectory() as folder:
        text, binary = Path(folder) / "schedule.goal", Path(folder) / "schedule.bin"
        export(graph, known, text)
        subprocess.run(["txt2bin", "-i", text, "-o", binary], check=True, capture_output=True)
        command = ["LogGOPSim", "-b", "-f", binary, *"-L 0 -o 0 -g 0 -G 0".split()]
        before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        taken = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
    last, solving, whole = ours(graph, known)
    theirs = int(re.findall(r"(?:finishing time|Host \d+).*: (\d+)", said)[-1])
    figure("end, against LogGOPSim's", last, "ns", theirs, last == theirs)
    figure("LogGOPSim", nodes / 1e6 / taken, "M operations/s")
    figure("times LogGOPSim's operations/s", taken / solving, "x", GOAL, taken / solving >= GOAL)
    figure("times LogGOPSim's operations/s, with classes, matches, order, layout", taken / whole, "x")


if __name__ == "__main__":
    main()
