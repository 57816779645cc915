"""The bare graph from the ranks' traces: equal structures become one program class, equal values one value class."""

from __future__ import annotations

from typing import Any

import numpy as np

from prism_tools.capture.server import Group
from prism_tools.capture.trace import LANES
from prism_tools.graph import provenance
from prism_tools.graph.model import Graph, Groups, Launch, Payload, Program, Ragged, Ranks, StoreLog, Values
from prism_tools.graph.segments import find_segments

EMPTY_TRACE: dict[str, Any] = {}


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
) -> Graph:
    """The graph of ``len(launch.entropy)`` ranks. Ranks without a trace (given up) get no nodes."""
    world = len(launch.entropy)
    strings = Strings()
    programs: list[Program] = []
    values: list[Values] = []
    known: dict[bytes, int] = {}
    program_of, values_of, slots = [], [], []
    numbers = {(group.name, group.members): group.number for group in groups}
    for rank in range(world):
        trace = traces.get(rank) or empty_trace()
        columns = program_columns(trace, strings)
        key = b"program" + b"".join(a.tobytes() for a in columns.values()) + trace["edges"].tobytes()
        if key not in known:
            known[key] = len(programs)
            programs.append(Program(columns, trace["edges"]))
        program_of.append(known[key])
        arrays = [trace[name] for name in ("bytes", "count", "tag", "split_offset", "splits")]
        key = b"values" + b"".join(a.tobytes() for a in arrays)
        if key not in known:
            known[key] = len(values)
            values.append(Values(dict(zip(("bytes", "count", "tag"), arrays, strict=False)), Ragged(*arrays[3:])))
        values_of.append(known[key])
        slots.append(np.array([numbers[name, tuple(ranks)] for name, ranks in trace["slots"]], np.int32))
    place = np.arange(world, dtype=np.int32)
    ranks = Ranks(
        np.array(program_of, np.int32),
        np.array(values_of, np.int32),
        place % launch.nproc_per_node,
        place // launch.nproc_per_node,
        slots,
    )
    return Graph(
        stage="bare",
        world_size=world,
        launch=launch,
        groups=_groups(groups),
        programs=programs,
        values=values,
        ranks=ranks,
        lanes=list(LANES),
        strings=strings.texts,
        store=_store(store),
        payload=payload,
        environment=provenance.environment(),
        complete=complete,
    )


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
