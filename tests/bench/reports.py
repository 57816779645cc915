"""How long prism-inspect, and prism-calibrate with changes, take on 8,192 ranks of 10,098 nodes in 64 classes: whole tools by the
clock, with the processor's time as baseline, and their peak memory; the second run of each. Once as it is, once with one rank
that computes a tenth slower. No goals for what is as long as its output: nodes, of 64 ranks (646,272 rows), and pictures.
"""

import os
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

SLOW = 777
SECONDS, MEGABYTES = 3.0, 1000
LONG = ("nodes", "timeline")
INSPECT = {
    "summary": [],
    "check": [],
    "ranks": ["--format", "tsv"],
    "groups": ["--format", "tsv"],
    "nodes": ["--rank", "0-63", "--format", "tsv"],
    "timeline": ["-o", "timeline.png"],
    "timeline of an iteration": ["--iteration", "1", "-o", "timeline.png"],
}
CHANGES = {
    "scale": "op=all_reduce group=tp*=0.5",
    "set": "kind=compute at=train.py:*=50us",
    "delay": f"{SLOW}=5ms",
    "ideal": "comm",
    "ideal balance": "balance",
}


def tool(folder, *words):
    """Seconds by the clock and of the processor, and peak memory, MB, of a tool that succeeds."""
    began = time.perf_counter()
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen([ROOT / "bin" / words[0], *words[1:]], stdout=output, stderr=output, cwd=folder)
        _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"bench: {' '.join(words)}: status {process.returncode}\n{(folder / 'output').read_text()}")
    return time.perf_counter() - began, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


def measure(name, folder, *words):
    tool(folder, *words)
    wall, processor, peak = tool(folder, *words)
    limit = None if words[1] in LONG else SECONDS
    figure(name, wall, "s", limit, None if limit is None else wall <= limit, processor)
    figure(f"{name}: peak memory", peak, "MB", MEGABYTES, peak <= MEGABYTES)


def main():
    from prism_tools.graph import file

    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    cluster = clusters.Cluster(tp=8, pp=8, dp=128, ep=8, microbatches=84, iterations=3)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for what, slow in (("", []), (", a straggler", [SLOW])):
            graph = clusters.build(cluster)
            row = graph.ranks.program * cluster.tp + np.arange(graph.world_size) % cluster.tp
            graph.durations = clusters.durations(graph, row, slow=slow)
            file.write(graph, str(folder / "bare.h5"))
            tool(folder, "prism-calibrate", "bare.h5", "-o", "graph.h5")
            progress(f"{graph.world_size} ranks{what}")
            for name, options in INSPECT.items():
                measure(f"inspect {name}{what}", folder, "prism-inspect", name.split()[0], *options, "graph.h5")
            for name, value in CHANGES.items():
                options = [f"--{name.split()[0]}", value, "graph.h5", "-o", "planned.h5"]
                measure(f"calibrate --{name}{what}", folder, "prism-calibrate", *options)


if __name__ == "__main__":
    main()
