"""How fast prism-calibrate solves: rank by rank, in lockstep, by one rank of each class, and the whole tool.

Kernels are timed on one core by the processor's time (others' work on the machine shows less in it), after compilation,
medians of repeats in one process; whole tools by the clock, with the processor's time as baseline. Beside the lockstep
figures stands a plain pass of NumPy over the same bytes. `python tests/bench/solver.py 80` takes the 80 M node graphs
too (4 GB); without, up to 10 M.
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from figures import figure, progress

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.bench import clusters  # noqa: E402

REPEATS = 5
SHAPES = {1: {"dp": 8, "microbatches": 16}, 10: {"dp": 32, "microbatches": 64}, 80: {"dp": 128, "microbatches": 128}}
FILES = {
    "64 classes": clusters.Cluster(tp=8, pp=8, dp=128, ep=8, microbatches=84, iterations=3),
    "64 classes overlap": clusters.Cluster(tp=8, pp=8, dp=128, ep=8, microbatches=90, iterations=3, overlap=True),
    "a million ranks": clusters.Cluster(tp=8, pp=8, dp=16384, ep=8, microbatches=8, iterations=3),
}
GOALS = {"64 classes": (1.0, 500), "64 classes overlap": (1.0, 500), "a million ranks": (5.0, None)}


def median(function, repeats=REPEATS):
    """Seconds of processor time; the first call, which may compile, does not count."""
    function()
    times = []
    for _ in range(repeats):
        began = time.process_time()
        function()
        times.append(time.process_time() - began)
    return statistics.median(times)


def lockstep(millions, overlap):
    """All ranks distinct, thousands of them in lanes."""
    from prism_tools.calibrate import lockstep
    from prism_tools.graph.classes import classes_of
    from prism_tools.graph.match import find_matches
    from prism_tools.graph.order import dependency_order

    shape = SHAPES[millions] | {"microbatches": SHAPES[millions]["microbatches"] * (2 if not overlap else 1)}
    graph = clusters.build(clusters.Cluster(tp=8, pp=8, ep=8, iterations=1, overlap=overlap, **shape))
    known = clusters.durations(graph, np.arange(graph.world_size))
    began = time.process_time()
    matches = find_matches(graph, classes=classes_of(graph, np.zeros(graph.world_size)))
    order = dependency_order(graph, matches)
    lanes = lockstep.lanes_of(graph, matches, order, classes_of(graph, known.row))
    prepared = time.process_time() - began
    gap = lockstep.gaps(graph, matches, lanes, known)
    known.own.clear()
    end = np.zeros(len(gap), np.int64)
    taken = median(lambda: lockstep.ends(matches, order, lanes, gap, end))
    plain = median(lambda: np.add(end, gap, out=end))
    name = f"lockstep, {len(gap) / 1e6:.1f} M nodes, {graph.world_size} ranks" + (", overlap" if overlap else "")
    rate = len(gap) / 1e6 / taken
    figure(name, rate, "M nodes/s", *((800.0, rate >= 800) if not overlap else (30.0, rate >= 30)))
    figure(f"{name}: times a pass over its bytes", taken / plain, "x")
    figure(
        f"{name}: bytes", (gap.nbytes + end.nbytes) / len(gap), "B/node", 12.0, gap.nbytes + end.nbytes <= 12 * len(gap)
    )
    figure(f"{name}: classes, matches, order and lanes", prepared, "s")


def each(millions, overlap):
    """All ranks distinct, each solved by itself: what graphs without any symmetry take. In a process of its own."""
    command = [sys.executable, __file__, "--each", str(millions), *(["overlap"] if overlap else [])]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    name = f"worklist, {found['nodes'] / 1e6:.1f} M nodes, {found['ranks']} ranks" + (", overlap" if overlap else "")
    goal = 30.0 if overlap else 100.0
    for what in ("matches", "times, all else known", "order and times"):
        rate = found["nodes"] / 1e6 / found[what]
        figure(f"{name}: {what}", rate, "M nodes/s", *((goal, rate >= goal) if what != "matches" else ()))
    streamed = found["streamed"] / found["nodes"]
    figure(f"{name}: bytes that the times go through", streamed, "B/node", 12.0, streamed <= 12)
    figure(f"{name}: peak memory of the process", found["peak"] / found["nodes"], "B/node")
    figure(f"{name}: peak memory of the process", found["peak"] / 2**30, "GiB")


def solved_by_itself(millions, overlap):
    """What ``each`` reports: seconds of processor time, medians of three; bytes."""
    from prism_tools.calibrate.solver import evaluate
    from prism_tools.graph import worklist
    from prism_tools.graph.match import find_matches
    from prism_tools.graph.order import dependencies

    shape = SHAPES[millions] | {"microbatches": SHAPES[millions]["microbatches"] * (2 if not overlap else 1)}
    graph = clusters.build(clusters.Cluster(tp=8, pp=8, ep=8, iterations=1, overlap=overlap, **shape))
    known = clusters.durations(graph, np.arange(graph.world_size))
    found = {"ranks": graph.world_size, "matches": median(lambda: find_matches(graph), 3)}
    matches = find_matches(graph)
    found["nodes"] = nodes = int(matches.base[-1])
    found["order and times"] = median(lambda: evaluate(graph, matches, dependencies(graph, matches), known).arrival, 3)
    order = dependencies(graph, matches)
    found["times, all else known"] = median(lambda: evaluate(graph, matches, order, known), 3)
    gap, end = worklist.gaps(order, known).itemsize, 8
    found["streamed"] = order.layout.code.nbytes + order.layout.member.nbytes + nodes * (gap + end)
    found["streamed"] += len(matches) * (8 + 16)  # where its members begin, the latest arrival, how many have come
    found["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps(found))


def phases(path):
    """In a process of its own: seconds of loading, solving and writing a file, after compilation; peak memory, MB."""
    from prism_tools.calibrate import calibrate
    from prism_tools.graph import file

    seconds = []
    for _ in range(3):
        began = time.perf_counter(), time.process_time()
        file.write(calibrate(file.read(path)), path + ".out")
        seconds.append((time.perf_counter() - began[0], time.process_time() - began[1]))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps([*(min(column) for column in zip(*seconds, strict=True)), peak]))


def files(folder):
    """Whole files of ranks of 64 classes."""
    from prism_tools.graph import file

    for name, cluster in FILES.items():
        graph = clusters.build(cluster)
        ranks = np.arange(graph.world_size)
        graph.durations = clusters.durations(graph, graph.ranks.program * cluster.tp + ranks % cluster.tp)
        path = str(folder / "graph.h5")
        file.write(graph, path)
        nodes = len(graph.programs[1])
        progress(f"{name}: {graph.world_size} ranks of {nodes} nodes")
        run = subprocess.run([sys.executable, __file__, "--phases", path], capture_output=True, text=True, check=True)
        wall, processor, peak = json.loads(run.stdout)
        limit, memory = GOALS[name]
        name = f"{name}, {graph.world_size} ranks of {nodes} nodes"
        figure(f"{name}: load, solve, write", wall, "s", limit, wall <= limit, processor)
        figure(f"{name}: peak memory", peak, "MB", memory, None if memory is None else peak <= memory)
        wall, processor = tool(path)
        figure(f"{name}: prism-calibrate", wall, "s", baseline=processor)


def tool(path):
    """Seconds of prism-calibrate the second time: by the clock, and of the processor."""
    for _ in range(2):
        began, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([ROOT / "bin" / "prism-calibrate", path, "-o", path + ".out"], check=True)
    done = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.perf_counter() - began, done.ru_utime + done.ru_stime - used.ru_utime - used.ru_stime


def measured(folder):
    """A file of 8,192 ranks of which prism-slice measured one replica."""
    from prism_tools.graph import file

    graph = clusters.sliced(clusters.Cluster(tp=8, pp=8, dp=128, ep=8, microbatches=84, iterations=3))
    file.write(graph, str(folder / "sliced.h5"))
    wall, processor = tool(str(folder / "sliced.h5"))
    name = f"{graph.world_size} ranks of {len(graph.programs[1])} nodes, {len(graph.timing.rank)} measured"
    figure(f"{name}: prism-calibrate", wall, "s", baseline=processor)


def small(folder):
    """A file of a few ranks."""
    from prism_tools.graph import file

    graph = clusters.build(clusters.Cluster())
    graph.durations = clusters.durations(graph, np.arange(graph.world_size))
    file.write(graph, str(folder / "small.h5"))
    wall, processor = tool(str(folder / "small.h5"))
    figure("prism-calibrate, 8 ranks of 100 nodes", wall, "s", 1.5, wall <= 1.5, processor)


def main():
    largest = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    with tempfile.TemporaryDirectory() as folder:
        small(Path(folder))
        files(Path(folder))
        measured(Path(folder))
    for millions in (size for size in SHAPES if size <= largest):
        for overlap in (False, True):
            progress(f"{millions} M nodes, overlap: {overlap}")
            lockstep(millions, overlap)
            each(millions, overlap)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--phases"]:
        phases(sys.argv[2])
    elif sys.argv[1:2] == ["--each"]:
        solved_by_itself(int(sys.argv[2]), sys.argv[3:] == ["overlap"])
    else:
        main()
