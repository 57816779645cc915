"""The bare graph from the ranks' traces: equal structures become one program class, equal values one value class."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from prism_tools.capture.server import Group
from prism_tools.capture.trace import LANES
from prism_tools.graph import provenance
from prism_tools.graph.model import Graph, Groups, Launch, Payload, Program, Ragged, Ranks, StoreLog, Values
from prism_tools.graph.schema import VALUE_COLUMNS
from prism_tools.graph.segments import find_segments

ARRAYS = ("bytes", "count", "tag", "split_offset", "splits")  # of a trace: what makes its value class


class Shared:
    """Keeps what ranks' traces have in common once: memory grows with what differs, not with ranks times nodes."""

    def __init__(self) -> None:
        self._arrays: dict[tuple[str, tuple[int, ...], bytes], np.ndarray] = {}
        self._others: dict[Any, Any] = {}

    def trace(self, trace: dict[str, Any]) -> dict[str, Any]:
        """The trace of a recorded rank with equal parts shared, and without times, which mean nothing in a recording."""
        columns = {name: self._array(column) for name, column in trace["columns"].items()}
        arrays: dict[str, Any] = {name: self._array(trace[name]) for name in ("edges", *ARRAYS)}
        alike: dict[str, Any] = {name: self.other(tuple(trace[name])) for name in ("sites", "slots")}
        rest: dict[str, Any] = {name: trace[name] for name in ("rss", "status") if name in trace}
        return {"columns": columns, **arrays, **alike, **rest}

    def _array(self, array: np.ndarray) -> np.ndarray:
        return self._arrays.setdefault((array.dtype.str, array.shape, hashlib.blake2b(array.tobytes()).digest()), array)

    def other(self, value: Any) -> Any:
        """The first of equal values."""
        return self._others.setdefault(value, value)


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
    missing = empty_trace()
    members = [classes.add(traces.get(rank, missing), numbers) for rank in range(world)]
    place = np.arange(world, dtype=np.int32)
    ranks = Ranks(
        np.array([program for program, _, _ in members], np.int32),
        np.array([values for _, values, _ in members], np.int32),
        place % launch.nproc_per_node,
        place // launch.nproc_per_node,
        Ragged.from_rows([slots for _, _, slots in members], np.int32),
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
        self._alike: dict[tuple, int] = {}  # arrays of a trace, by identity, and its sites → program class
        self._known: dict[bytes, int] = {}  # content → program class or value class

    def add(
        self, trace: dict[str, Any], numbers: dict[tuple[str, str, tuple[int, ...]], int]
    ) -> tuple[int, int, np.ndarray]:
        """A rank's program class, value class, and the group of each of its slots (int32)."""
        arrays = (*trace["columns"].values(), trace["edges"])
        alike = (*map(id, arrays), *trace["sites"])
        if alike not in self._alike:  # of thousands of ranks that Shared found equal, one is looked at
            self._alike[alike] = self._program(program_columns(trace, self.strings), trace["edges"])
        values = [trace[name] for name in ARRAYS]
        key = b"values" + hashlib.blake2b(b"".join(a.tobytes() for a in values)).digest()
        if key not in self._known:
            self._known[key] = len(self.values)
            self.values.append(Values(dict(zip(VALUE_COLUMNS, values, strict=False)), Ragged(*values[3:])))
        slots = np.array([numbers[name, backend, tuple(ranks)] for name, backend, ranks in trace["slots"]], np.int32)
        return self._alike[alike], self._known[key], slots

    def _program(self, columns: dict[str, np.ndarray], edges: np.ndarray) -> int:
        """The class of these columns, [n] each, and edges, [m, 2]; a new one if none is equal."""
        content = b"".join(a.tobytes() for a in columns.values()) + edges.tobytes()
        key = b"program" + hashlib.blake2b(content).digest()
        if key not in self._known:
            self._known[key] = len(self.programs)
            self.programs.append(Program(columns, edges))
        return self._known[key]


def empty_trace() -> dict[str, Any]:
    """The trace of a rank that ended before it could send one."""
    from prism_tools.capture.trace import Tracer

    return Tracer().export(0, []) | {"slots": []}


def _groups(groups: list[Group]) -> Groups:
    return Groups(
        [group.name for group in groups],
        [group.desc for group in groups],
        [group.backend for group in groups],
        Ragged.from_rows([group.members for group in groups], np.int32),
    )


def _store(log: list[tuple[int, str, str, bytes]]) -> StoreLog:
    return StoreLog(
        np.array([row[0] for row in log], np.int32), [r[1] for r in log], [r[2] for r in log], [r[3] for r in log]
    )
