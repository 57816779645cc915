"""The report: the answer first, then why; only lines whose data exist."""

from __future__ import annotations

import math
import shlex
from collections import Counter

import numpy as np

from prism_tools.analyze.lateness import Lateness, lateness, straggler
from prism_tools.analyze.steady import cycle_path, cycle_time
from prism_tools.analyze.text import WIDTH, brief, cut, percent, size, with_interval
from prism_tools.analyze.waits import path_shares, slow_span
from prism_tools.graph.alike import timed_alike
from prism_tools.graph.iterations import counted
from prism_tools.graph.match import Matches
from prism_tools.graph.model import Graph
from prism_tools.graph.names import ranks_text
from prism_tools.graph.schema import PRETEND_CUDA, UNKNOWN, Source

LABEL = 18  # width of the first column
SLOW = 0.05  # of the iterations: from here on one rank's excess is worth a line
SHOWN = 3  # ranks spelt out in the memory line
SOURCES = (Source.REAL, Source.PROBE, Source.FIT, Source.EMULATED)


def summary(graph: Graph) -> str:
    """A few lines on ``graph``, each at most 100 wide. Works at every stage."""
    lines = [_world(graph), *_state(graph), *_iteration_time(graph)]
    if graph.timeline is not None:
        matches = timed_alike(graph)
        late = lateness(graph, matches)
        lines += _critical_path(graph, matches, late)
        lines += _steady(graph)
        lines += _memory(graph)
        lines += _slowest_member(graph, matches, late)
        lines += _slow_span(graph)
    else:
        lines += _memory(graph)
    lines += _groups(graph)
    return "\n".join(cut(line) for line in lines)


def _line(label: str, text: str) -> str:
    return f"{label:<{LABEL}}  {text}"


def _world(graph: Graph) -> str:
    dimensions = _dimensions(graph)
    shape = f" ({' · '.join(f'{name} {size}' for name, size in dimensions)})" if dimensions else ""
    backends = sorted(set(graph.groups.backend)) or [graph.launch.backend]
    end = f"   backend {'+'.join(backends)}   iterations {graph.iterations()}"
    start = f"world {graph.world_size}{shape}   program "
    return start + cut(shlex.join(graph.launch.argv), max(WIDTH - len(start) - len(end), 12)) + end


def _dimensions(graph: Graph) -> list[tuple[str, int]]:
    """Named dimensions of a device mesh and their sizes: torch describes their groups as "mesh_tp"."""
    sizes: dict[str, set[int]] = {}
    for desc, members in zip(graph.groups.desc, graph.groups.members, strict=True):
        if desc.startswith("mesh_"):
            sizes.setdefault(desc.removeprefix("mesh_").upper(), set()).add(len(members))
    return [(name, size.pop()) for name, size in sizes.items() if len(size) == 1]


def _state(graph: Graph) -> list[str]:
    """What is there while there are no times yet, and what is wrong with the file."""
    lines = []
    if graph.launch.device == PRETEND_CUDA:
        lines.append(_line("devices", "CUDA pretended on CPUs: no times, memory or overlap of a GPU are known"))
    if not graph.complete:
        lines.append(_line("incomplete", "the recording stopped early; only what happened before is here"))
    lines += _ran(graph)
    if graph.timeline is not None:
        return lines
    nodes = sum(len(graph.program_of(rank)) for rank in range(graph.world_size))
    kept = f"payloads {graph.payload.mode} ({size(graph.payload.bytes)})"
    classes = "1 program class" if len(graph.programs) == 1 else f"{len(graph.programs)} program classes"
    lines.append(_line("recorded", f"{nodes:,} nodes in {classes}, {kept}"))
    if graph.timing is not None and len(graph.timing.rank):
        ranks, slices = set(graph.timing.rank.tolist()), set(graph.timing.slice.tolist())
        count = f"{len(slices)} slice{'s'[: len(slices) != 1]}"
        lines.append(_line("measured", f"ranks {ranks_text(ranks)} of {graph.world_size} in {count}"))
    return lines


def _ran(graph: Graph) -> list[str]:
    """Of how many ranks it is only taken that they do what others did."""
    ran = graph.ranks.ran
    if ran is None or not (others := ran != np.arange(graph.world_size)).any():
        return []
    count, world = int(others.sum()), graph.world_size
    taken = f"{count:,} {'is' if count == 1 else 'are'} taken to do as one of these did: {ranks_text(ran[others])}"
    return [_line("ran", f"{world - count:,} of {world:,} ranks, a sample: {taken}")]


def _iteration_time(graph: Graph) -> list[str]:
    parts = []
    if graph.timeline is not None and graph.timeline.iteration_time_ns != UNKNOWN:
        half = graph.timeline.interval_ns
        solved = with_interval(graph.timeline.iteration_time_ns, math.nan if half == UNKNOWN else half)
        parts.append(f"solved {solved}{_runs(graph)}")
    parts += _measured(graph) + _replayed(graph)
    line = _line("iteration time", "     ".join(parts))
    if len(line) <= WIDTH:
        return [line] if parts else []
    return [_line("" if k else "iteration time", part) for k, part in enumerate(parts)]


def _runs(graph: Graph) -> str:
    """How often ranks were measured: one run says nothing of how the next one would differ."""
    if graph.timing is None or not len(graph.timing.rank):
        return ""
    least = min(Counter(graph.timing.rank.tolist()).values())
    return f"  ({least} run{'s'[: least != 1]} of each slice)"


def _measured(graph: Graph) -> list[str]:
    """Where all ranks ran for real at once: mean over ranks and counted iterations, tracing included, with two standard
    errors."""
    timing, chosen = graph.timing, np.array(counted(graph), int)
    if timing is None or not len(chosen) or not len(timing.iteration_ns):
        return []
    runs: dict[tuple[int, int], dict[int, np.ndarray]] = {}
    for row, rank in enumerate(timing.rank.tolist()):
        runs.setdefault((int(timing.slice[row]), int(timing.repeat[row])), {})[rank] = timing.iteration_ns[row]
    whole = [list(run.values()) for run in runs.values() if len(run) == graph.world_size]
    times = [
        np.mean([row[chosen] for row in run], axis=0) for run in whole if all(len(row) > chosen[-1] for row in run)
    ]
    if not times or min(time.min() for time in times) < 0:
        return []
    every = np.concatenate(times)
    half = 2 * float(np.std(every, ddof=1)) / math.sqrt(len(every)) if len(every) > 1 else math.nan
    return [f"measured {with_interval(float(np.mean(every)), half)}  ({len(every)} iterations, traced)"]


def _replayed(graph: Graph) -> list[str]:
    """Mean over ranks and valid iterations after warm-up; half-width: two standard errors."""
    if graph.replay is None:
        return []
    rows = [np.where(row < 0, np.nan, row) for row in graph.replay.timing.iteration_ns if len(row)]
    count = min((len(row) for row in rows), default=0)
    if not count:
        return []
    first = min(max(1, graph.launch.warmup), count - 1)
    per_iteration = np.mean([row[first:count] for row in rows], axis=0)
    known = ~np.isnan(per_iteration)
    if not known.any():
        return []
    per_iteration, valid = per_iteration[known], graph.replay.valid[first:count][known]
    used = per_iteration[valid] if valid.any() else per_iteration
    half = 2 * float(np.std(used, ddof=1)) / math.sqrt(len(used)) if len(used) > 1 else math.nan
    late = int(graph.replay.late.sum())
    notes = f"{len(used)} iteration{'s'[: len(used) != 1]}, {late:,} late deliveries"
    if not valid.all():
        notes += ", none valid" if not valid.any() else f", {int((~valid).sum())} invalid left out"
    return [f"replayed {with_interval(float(used.mean()), half)}  ({notes})"]


def _critical_path(graph: Graph, matches: Matches, late: Lateness) -> list[str]:
    shares = path_shares(graph, matches, late)
    if not shares.total:
        return []
    whole = shares.total
    waiting, last = sum(shares.waiting.values()), []
    if waiting >= 0.0005 * whole:
        (rank, most), *_ = shares.waiting.most_common(1)
        if most >= waiting / 2:  # one culprit; what the others' raggedness costs stays compute
            shares.by_kind["compute"] += waiting - most
            last = [f"waiting for rank {rank}: {percent(most, whole)}"]
        else:
            last = [f"waiting {percent(waiting, whole)}"]
    named = [(name, ns) for name, ns in shares.by_kind.most_common() if ns >= 0.0005 * whole]
    gap = "   "
    while True:
        line = _line("  critical path", gap.join([f"{name} {percent(ns, whole)}" for name, ns in named] + last))
        if len(line) <= WIDTH or len(named) <= 2:
            break
        if gap == "  ":  # still too long: the smallest kinds become one
            named[-2:] = [("other", named[-2][1] + named[-1][1])]
        gap = "  "
    lines = [line]
    if shares.by_source:
        listed = [*SOURCES, *[Source.PLANNED] * bool(shares.by_source[Source.PLANNED])]
        known = [f"{source.name.lower()} {100 * shares.by_source[source] / whole:.0f} %" for source in listed]
        lines.append(_line("  where durations come from", "   ".join(known)))
    return lines


def _steady(graph: Graph) -> list[str]:
    if graph.steady is None:
        return []
    lines = [_line("steady state", cycle_time(graph, graph.steady))]
    return lines + [_line("  critical cycle", cycle_path(graph, graph.steady))] * (not graph.steady.problem)


def _memory(graph: Graph) -> list[str]:
    memory = graph.memory
    if memory is None or not len(memory.rank):
        return []
    latest = memory.stage[-1]  # rows are appended; other stages ran other ranks beside this one
    on_device = bool((memory.allocated >= 0).any())
    column = memory.allocated if on_device else memory.rss
    peak: dict[int, int] = {}
    for rank, used, stage in zip(memory.rank.tolist(), column.tolist(), memory.stage, strict=True):
        if stage == latest:
            peak[rank] = max(used, peak.get(rank, 0))
    note = f"(allocated; reserved {size(int(memory.reserved.max()))})" if on_device else "(RSS; CPU run)"
    ordered = sorted(peak.items())
    if len(ordered) <= SHOWN:
        text = "   ".join(f"rank {rank}  {size(used)}" for rank, used in ordered)
    else:
        low, high = min(ordered, key=lambda item: item[1]), max(ordered, key=lambda item: item[1])
        text = f"rank {high[0]}  {size(high[1])} is most of {len(ordered)} ranks, rank {low[0]}  {size(low[1])} least"
    return [_line("peak memory", f"{text}   {note}")]


def _slowest_member(graph: Graph, matches: Matches, late: Lateness) -> list[str]:
    """The rank that others waited for longest in collectives, counted in those that it takes part in."""
    found = straggler(graph, matches, late)
    if found is None:
        return []
    often = f"{found.times:,} of {found.joined:,} collectives, by {brief(found.total / found.times)} ms"
    site = f" ({found.site})" if found.site else ""
    return [_line("slowest member", f"rank {found.rank} is last in {often}{site}")]


def _slow_span(graph: Graph) -> list[str]:
    """Between which lines the straggler is slow, also where collectives see only ranks that it holds up."""
    span = slow_span(graph)
    if span is None or graph.timeline is None or not 0 < SLOW * graph.timeline.iteration_ns.sum() <= span.excess:
        return []
    file = span.after.partition(":")[0]
    sites = span.after or "the start", span.before.removeprefix(file or "/") or "the end"
    more = f"rank {span.rank} takes {brief(span.excess / span.times)} ms more than its peers"
    return [_line("  slow span", f"{more}: {' → '.join(sites)}")]


def _groups(graph: Graph) -> list[str]:
    if graph.replay is None:
        return []
    sandbox = len(set(graph.replay.timing.rank.tolist()))
    created, touched = graph.replay.groups_created, graph.replay.virtual_ranks_touched
    virtual = graph.world_size - sandbox
    return [_line("groups", f"{created} created of {len(graph.groups)}   virtual ranks touched {touched} of {virtual}")]
