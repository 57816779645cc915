"""The bare graph from the ranks' traces: equal structures become one program class, equal values one value class."""

from __future__ import annotations

from typing import Any

import numpy as np

from prism_tools.capture.server import Group
from prism_tools.capture.trace import LANES
from prism_tools.graph import provenance
from prism_tools.graph.model import Graph, Groups, Launch, Payload, Program, Ragged, Ranks, StoreLog, Values
from prism_tools.graph.schema import VALUE_COLUMNS
from prism_tools.graph.segments import find_segments


class Strings:
    """Interned strings of the graph."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._index: dict[str, int] = {}

    def index(self, text: str) -> int:
        """Number of ``text``, added if new."""
        if text not in self._index:
            self._index[text] = len(self.texts)
            self.texts.append(text)
        return self._index[text]


def program_columns(trace: dict[str, Any], strings: Strings) -> dict[str, np.ndarray]:
    """The trace's node columns with call sites as indices into ``strings`` and the segments found."""
    columns = dict(trace["columns"])
    places = np.array([strings.index(text) for text in trace["sites"]] + [-1], np.int32)
    columns["callsite"] = places[columns["callsite"]]
    columns["segment"] = find_segments(columns)
    return columns


def build(
    traces: dict[int, dict[str, Any]],
    groups: list[Group],
    launch: Launch,
    payload: Payload,
    store: list[tuple[int, str, str, bytes]],
    complete: bool = True,
    lanes: tuple[str, ...] = tuple(LANES),
) -> Graph:
    """The graph of ``len(launch.entropy)`` ranks. Ranks without a trace (given up) get no nodes. ``lanes``: what the
    traces' lane columns count."""
    world = len(launch.entropy)
    classes = _Classes()
    numbers = {(group.name, group.backend, group.members): group.number for group in groups}
    members = [classes.add(traces.get(rank) or empty_trace(), numbers) for rank in range(world)]
    place = np.arange(world, dtype=np.int32)
    ranks = Ranks(
        np.array([program for program, _, _ in members], np.int32),
        np.array([values for _, values, _ in members], np.int32),
        place % launch.nproc_per_node,
        place // launch.nproc_per_node,
        [slots for _, _, slots in members],
    )
    return Graph(
        stage="bare",
        world_size=world,
        launch=launch,
        groups=_groups(groups),
        programs=classes.programs,
        values=classes.values,
        ranks=ranks,
        lanes=list(lanes),
        strings=classes.strings.texts,
        store=_store(store),
        payload=payload,
        environment=provenance.environment(),
        complete=complete,
    )


class _Classes:
    """Program and value classes found so far."""

    def __init__(self) -> None:
        self.strings = Strings()
        self.programs: list[Program] = []
        self.values: list[Values] = []
        self._known: dict[bytes, int] = {}

    def add(
        self, trace: dict[str, Any], numbers: dict[tuple[str, str, tuple[int, ...]], int]
    ) -> tuple[int, int, np.ndarray]:
        """A rank's program class, value class, and the group of each of its slots (int32)."""
        columns = program_columns(trace, self.strings)
        key = b"program" + b"".join(a.tobytes() for a in columns.values()) + trace["edges"].tobytes()
        if key not in self._known:
            self._known[key] = len(self.programs)
            self.programs.append(Program(columns, trace["edges"]))
        program = self._known[key]
        arrays = [trace[name] for name in ("bytes", "count", "tag", "split_offset", "splits")]
        key = b"values" + b"".join(a.tobytes() for a in arrays)
        if key not in self._known:
            self._known[key] = len(self.values)
            self.values.append(Values(dict(zip(VALUE_COLUMNS, arrays, strict=False)), Ragged(*arrays[3:])))
        slots = np.array([numbers[name, backend, tuple(ranks)] for name, backend, ranks in trace["slots"]], np.int32)
        return program, self._known[key], slots


def empty_trace() -> dict[str, Any]:
    """The trace of a rank that ended before it could send one."""
    from prism_tools.capture.trace import Tracer

    return Tracer().export(0, []) | {"slots": []}


def _groups(groups: list[Group]) -> Groups:
    return Groups(
        [group.name for group in groups],
        [group.desc for group in groups],
        [group.backend for group in groups],
        [np.array(group.members, np.int32) for group in groups],
    )


def _store(log: list[tuple[int, str, str, bytes]]) -> StoreLog:
    return StoreLog(
        np.array([row[0] for row in log], np.int32), [r[1] for r in log], [r[2] for r in log], [r[3] for r in log]
    )
