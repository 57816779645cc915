"""Further passes: slices measured again while virtual peers keep the solved times, until the iteration time stays (design §6)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from prism_tools.calibrate import calibrate
from prism_tools.graph.model import Graph, Timeline
from prism_tools.graph.schema import UNKNOWN
from prism_tools.slicing.kept import Kept
from prism_tools.slicing.measuring import Job, Slices, one_pass
from prism_tools.slicing.noise import own_per_iteration

SETTLED = 0.001  # of the iteration time: a pass that moves it by less is the last (design §6)


def run_passes(
    job: Job, todo: Slices, kept: Kept, graph: Graph, before: Timeline | None
) -> tuple[Graph, list[dict[str, Any]]]:
    """Repeat ``todo`` at solved times; ``graph`` holds the first pass, made at the times of ``before`` if there is one.

    Returns the graph of the last pass (the first one that moved the iteration time by less than SETTLED, or number --passes,
    with a warning), and for each pass the solved iteration time and the share by which it moved.
    """
    options = job.options
    told: list[dict[str, Any]] = []
    time = None if before is None else job_time(before)
    spans: dict[int, float] = {}
    while True:
        solved = calibrate(graph)
        assert solved.timeline is not None
        now, own = job_time(solved.timeline), {rank: float(np.median(runs)) for rank, runs in own_per_iteration(graph)}
        moved = None if time is None else now / time - 1
        told.append({"iteration_ns": now, "moved": moved})
        options.progress.say(f"pass {len(told)}: {_moved_text(time, now)}{_spans_text(spans, own)}")
        settled = moved is not None and abs(moved) < SETTLED
        if settled or len(told) == options.passes:
            break
        time, spans = now, own
        label = f"pass-{len(told) + 1}-"
        base = replace(job.graph, timing=None, probes=graph.probes)
        job = replace(job, graph=base, durations=solved.durations, label=label)
        graph = one_pass(job, todo, kept)
    if moved is not None and not settled:
        half = solved.timeline.interval_ns
        known = f"; its own interval is ± {100 * half / now:.1f} %" if half != UNKNOWN else ""
        last = f"the iteration time moved by {100 * moved:+.2f} % in the last pass"
        options.progress.warn(f"{last}{known}: more --passes, or more --repeat where that is wide")
    return graph, told


def job_time(timeline: Timeline) -> int:
    """Solved time of an iteration, ns; of the whole program where it has none."""
    if timeline.iteration_time_ns != UNKNOWN:
        return max(timeline.iteration_time_ns, 1)
    return max(1, *(int(row.max(initial=0)) for row in timeline.end))


def _moved_text(before: int | None, now: int) -> str:
    if before is None:
        return f"iteration {now / 1e6:,.2f} ms"
    return f"iteration {before / 1e6:,.2f} → {now / 1e6:,.2f} ms ({100 * (now / before - 1):+.2f} %)"


def _spans_text(before: dict[int, float], now: dict[int, float]) -> str:
    """By how much the ranks' own time, ns per iteration, changed in all, and whose most; "" after the first pass."""
    change = {rank: now[rank] - before[rank] for rank in now if rank in before}
    whole = sum(before[rank] for rank in change)
    if not whole:
        return ""
    most = max(change, key=lambda rank: abs(change[rank]))
    total = 100 * sum(change.values()) / whole
    return f"; own spans {total:+.2f} % (rank {most} most: {change[most] / 1e6:+.2f} ms)"
