"""The steady state in words: how long an iteration takes in the long run, and through which ranks and lines."""

from __future__ import annotations

import math

from prism_tools.analyze.text import with_interval
from prism_tools.graph.model import Graph, Steady
from prism_tools.graph.names import sites_of
from prism_tools.graph.schema import UNKNOWN


def cycle_time(graph: Graph, steady: Steady) -> str:
    """ "182.41 ms ± 0.6  every iteration from 2 on": with the timeline's interval, since both stand on the same durations."""
    if steady.problem:
        return f"none: {steady.problem}"
    half = graph.timeline.interval_ns if graph.timeline is not None else UNKNOWN
    mean = with_interval(steady.total_ns / steady.iterations, math.nan if half == UNKNOWN else half)
    if steady.period == UNKNOWN:
        return f"{mean}  on average, not periodic within {steady.horizon:,} iterations"
    every = "every iteration" if steady.period == 1 else f"every {steady.period} iterations alike"
    return f"{mean}  {every} from {steady.since} on, if nothing varied"


def cycle_path(graph: Graph, steady: Steady) -> str:
    """ "1 iteration of rank 3: gpt.py:77, :91; rank 1: :95": the critical cycle's ranks and call sites, each file once.

    A line that repeats (a loop) is named once in a row; what has no call site only counts for its rank.
    """
    parts: list[tuple[int, list[str]]] = []
    sites_by_program = [sites_of(program) for program in graph.programs]
    last = ""
    for rank, node in steady.critical.tolist():
        if not parts or parts[-1][0] != rank:
            parts.append((rank, []))
        number = int(sites_by_program[graph.ranks.program[rank]][node])
        site = graph.strings[number] if number >= 0 else ""
        site = site.rpartition(" ")[0] or site  # the function; the file's name may have blanks too
        if site in ("", "?", last):
            continue
        file = site.partition(":")[0]
        parts[-1][1].append(site.removeprefix(file) if last.startswith(f"{file}:") else site)
        last = site
    text = "; ".join(f"rank {rank}" + (f": {', '.join(sites)}" if sites else "") for rank, sites in parts)
    many = f"{steady.iterations} iterations, " if steady.iterations > 1 else ""
    return many + text
