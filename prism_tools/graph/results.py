"""The layout of what later stages add: measured times, probes, memory, durations, the timeline, a replay."""

from __future__ import annotations

from typing import Any

import numpy as np

from prism_tools.graph.fields import Fields, Tree, pack_lists, pack_rows, pack_strings, split
from prism_tools.graph.model import Durations, Memory, Probes, Replay, Steady, Timeline, Timing

TIMES = ("host_issue", "ready", "start", "end")
TIMING_ROWS = {
    "rank": "i4",
    "slice": "i4",
    "repeat": "i4",
    "clock_offset": "i8",
    "clock_drift": "i8",
    "clock_error": "i8",
}
MEMORY_COLUMNS = {name: "i8" for name in ("rss", "allocated", "reserved")}
PROBE_ROWS = {
    "op": "u1",
    "dtype": "i2",
    "reduce": "u1",
    "size": "i4",
    "bytes": "i8",
    "duration": "i8",
    "spread": "i8",
    "repeats": "i4",
}
STEADY_NUMBERS = ("total_ns", "iterations", "since", "period", "horizon")
DURATION_LISTS = {"own": "i8", "tail": "i8", "spread": "i8", "bias": "i8", "source": "u1"}


def _cast(part: Any, dtypes: dict[str, str]) -> Tree:
    return {name: np.asarray(getattr(part, name)).astype(dtype, copy=False) for name, dtype in dtypes.items()}


def _pack_timing(timing: Timing) -> Tree:
    tree = {**_cast(timing, TIMING_ROWS), **pack_lists({name: (getattr(timing, name), "i8") for name in TIMES})}
    if timing.iteration_ns:
        tree["iteration_ns"] = pack_rows(timing.iteration_ns, "i8")
    return tree


def _timing(group: Fields, world_size: int) -> Timing:
    count = len(group.array("rank", "i4"))
    columns: dict[str, Any] = {name: group.array(name, dtype, count) for name, dtype in TIMING_ROWS.items()}
    columns |= group.lists(dict.fromkeys(TIMES, "i8"), count)
    if "iteration_ns" in group:
        ragged = group.rows("iteration_ns", "i8", count)
        columns["iteration_ns"] = split(ragged.offset, ragged.data)
    return Timing(**columns)


def _pack_probes(probes: Probes) -> Tree:
    rows = {name: pack_rows(getattr(probes, name), "i8") for name in ("tails", "issue")}
    return {**_cast(probes, PROBE_ROWS | {"processes": "i4"}), **rows}


def _probes(group: Fields, world_size: int) -> Probes:
    count = len(group.array("op", "u1"))
    columns: dict[str, Any] = {name: group.array(name, dtype, count) for name, dtype in PROBE_ROWS.items()}
    if "processes" in group:
        columns["processes"] = group.array("processes", "i4", count)
    for name in ("tails", "issue"):
        rows = group.rows(name, "i8", count)
        columns[name] = split(rows.offset, rows.data)
    return Probes(**columns)


def _pack_memory(memory: Memory) -> Tree:
    return {**_cast(memory, {"rank": "i4", **MEMORY_COLUMNS}), "stage": pack_strings(memory.stage)}


def _memory(group: Fields, world_size: int) -> Memory:
    rank = group.array("rank", "i4")
    columns = {name: group.array(name, dtype, len(rank)) for name, dtype in MEMORY_COLUMNS.items()}
    return Memory(rank, **columns, stage=group.strings("stage", len(rank)))


def _pack_durations(durations: Durations) -> Tree:
    lists = {name: (getattr(durations, name), dtype) for name, dtype in DURATION_LISTS.items()}
    return {**_cast(durations, {"row": "i4"}), **pack_lists(lists)}


def _durations(group: Fields, world_size: int) -> Durations:
    stored = {name: dtype for name, dtype in DURATION_LISTS.items() if name != "bias" or name in group}
    lists = group.lists(stored)
    if "bias" not in lists:
        lists["bias"] = [np.zeros(len(own), np.int64) for own in lists["own"]]
    return Durations(group.array("row", "i4", world_size), **lists)


def _pack_timeline(timeline: Timeline) -> Tree:
    return {
        "iteration_time_ns": int(timeline.iteration_time_ns),
        "interval_ns": int(timeline.interval_ns),
        **_cast(timeline, {"row": "i4", "iteration_ns": "i8"}),
        **pack_lists({"start": (timeline.start, "i8"), "end": (timeline.end, "i8")}),
        "critical": np.asarray(timeline.critical, "i8").reshape(-1, 2),
    }


def _timeline(group: Fields, world_size: int) -> Timeline:
    return Timeline(
        row=group.array("row", "i4", world_size),
        **group.lists({"start": "i8", "end": "i8"}),
        iteration_ns=group.array("iteration_ns", "i8"),
        iteration_time_ns=group.integer("iteration_time_ns"),
        interval_ns=group.integer("interval_ns"),
        critical=group.array("critical", "i8", width=2),
    )


def _pack_steady(steady: Steady) -> Tree:
    numbers = {name: int(getattr(steady, name)) for name in STEADY_NUMBERS}
    return {"problem": steady.problem, **numbers, "critical": np.asarray(steady.critical, "i8").reshape(-1, 2)}


def _steady(group: Fields, world_size: int) -> Steady:
    numbers = {name: group.integer(name) for name in STEADY_NUMBERS}
    return Steady(group.text("problem"), **numbers, critical=group.array("critical", "i8", width=2))


def _pack_replay(replay: Replay) -> Tree:
    return {
        "groups_created": int(replay.groups_created),
        "virtual_ranks_touched": int(replay.virtual_ranks_touched),
        **_cast(replay, {"late": "i8", "late_ns": "i8", "valid": "u1"}),
        "timing": _pack_timing(replay.timing),
    }


def _replay(group: Fields, world_size: int) -> Replay:
    late = group.array("late", "i8")
    return Replay(
        timing=_timing(group.group("timing"), world_size),
        late=late,
        late_ns=group.array("late_ns", "i8", len(late)),
        valid=group.array("valid", "u1", len(late)).astype(bool),
        groups_created=group.integer("groups_created"),
        virtual_ranks_touched=group.integer("virtual_ranks_touched"),
    )


# Optional groups in file order, each with its packer and its reader (fields, world size).
RESULTS: dict[str, tuple[Any, Any]] = {
    "timing": (_pack_timing, _timing),
    "probes": (_pack_probes, _probes),
    "memory": (_pack_memory, _memory),
    "durations": (_pack_durations, _durations),
    "timeline": (_pack_timeline, _timeline),
    "steady": (_pack_steady, _steady),
    "replay": (_pack_replay, _replay),
}
