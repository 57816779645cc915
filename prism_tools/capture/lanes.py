"""Lane and edge rules of a device (design §2): from a rank's operations and its device's log to the nodes of its program.

The host calls, streams run later. Every call that the log holds makes the same pattern: the host's span up to the call, the
stream's span up to the point where it was reached, and the node itself, which needs both. So a stream gets to a point no
sooner than the host issued it, and no sooner than its own work allows. What a stream does after a point was launched after
that point: its span needs the host's span that led there, too.

  record         a point of the stream (a WAIT for the host's issue); who waits for the event waits for it
  stream waits   a WAIT on that stream, which needs the point, or the operation, whose event it is
  host waits     a WAIT on the host, which needs the points that the stream, the event or the whole device had reached
  operation      a COMM node on the stream on which the backend recorded its last event: the caller's own, or one of the
                 backend's ("nccl n"), where it also follows that lane's operation before it
  step           a MARK on the caller's stream
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from prism_tools.capture.trace import LANES, POOL_LANE
from prism_tools.gpu.stamp import CALL, MARK, POINT, RECORD, RETURN, SYNC_DEVICE, SYNC_EVENT, SYNC_STREAM, WAIT
from prism_tools.graph.schema import HOST_LANE, NODE_COLUMNS, Kind, Op

NAMES = [name for name in NODE_COLUMNS if name != "segment"]
HOST_EVENT = -1  # a step of the tracer's own (gloo) among the log's kinds


@dataclass
class _Stream:
    """A lane under construction. ``last``: its newest node, over at ``end``; ``launch``: the host's node before which
    nothing newer on it was launched."""

    lane: int
    last: int = -1
    end: int = 0
    launch: int = -1


@dataclass
class _Open:
    """An operation, or group of operations, that has been called and has not returned."""

    stream: _Stream
    span: int
    host: int
    issued: int
    ready: int
    events: list[tuple[int, int]] = field(default_factory=list)  # recorded meanwhile: event, stream


class _Builder:
    def __init__(self, trace: dict[str, Any]) -> None:
        self.trace = trace
        self.nodes: list[tuple[int, ...]] = []  # kind, lane, tracer's node or -1, host_issue, ready, start, end
        self.edges: list[tuple[int, int]] = []
        self.host = -1
        self.resumed = 0  # when the host went on after its newest node
        self.lanes = list(LANES)
        self.streams: dict[int, _Stream] = {}
        self.backend: dict[int, _Stream] = {}
        self.event: dict[int, int] = {}
        self.open: dict[int, _Open] = {}
        self.points: list[int] = []
        self.made: dict[int, int] = {}  # the tracer's node -> node
        self.members = _batches(trace)

    def add(self, kind: int, lane: int, source: int, issue: int, ready: int, start: int, end: int) -> int:
        self.nodes.append((kind, lane, source, issue, ready, start, max(start, end)))
        return len(self.nodes) - 1

    def need(self, node: int, *sources: int) -> None:
        self.edges += [(source, node) for source in sources if source >= 0]

    def host_span(self, until: int) -> None:
        """The host computed until it called. Within a call of the host's own (gloo, on a device's tensors) it did not."""
        if until < self.resumed:
            return
        self.host = self.add(Kind.COMPUTE, HOST_LANE, -1, self.resumed, self.resumed, self.resumed, until)
        self.resumed = until

    def stream(self, handle: int) -> _Stream:
        if handle in self.backend:  # the program uses it as well: a priority stream of torch's pool
            return self.backend[handle]
        if handle not in self.streams:
            self.streams[handle] = _Stream(self._lane("stream", len(self.streams)), launch=self.host)
        return self.streams[handle]

    def backend_stream(self, handle: int) -> _Stream:
        if handle in self.streams:
            return self.streams[handle]
        if handle not in self.backend:
            self.backend[handle] = _Stream(self._lane("nccl", len(self.backend)))
        return self.backend[handle]

    def _lane(self, kind: str, number: int) -> int:
        self.lanes.append(f"{kind} {number}")
        return len(self.lanes) - 1

    def stream_span(self, stream: _Stream, reached: int, row: Any) -> int:
        """What the stream did until it reached a point that the host had issued; ``reached`` 0: nothing."""
        start = max(stream.end, self.nodes[stream.launch][6] if stream.launch >= 0 else 0)
        node = self.add(Kind.COMPUTE, stream.lane, -1, row["issued"], start, start, max(reached, row["before"]))
        self.need(node, stream.launch)
        stream.last, stream.end, stream.launch = node, self.nodes[node][6], self.host
        return node

    def point(self, kind: int, stream: _Stream, issue: int, source: int = -1, waits_for: int = -1) -> int:
        """A node of no length on a stream, after its span, the host's call and what it waits for."""
        ready = max(stream.end, self.nodes[waits_for][6] if waits_for >= 0 else 0)
        node = self.add(kind, stream.lane, source, issue, ready, stream.end, ready)
        self.need(node, self.host)
        if waits_for >= 0 and self.nodes[waits_for][1] != stream.lane:
            self.need(node, waits_for)
        stream.last, stream.end = node, self.nodes[node][6]
        return node

    def host_wait(self, start: int, end: int, *sources: int) -> None:
        """Not where one of the backend's threads waits within a call of the host's own."""
        if start < self.resumed:
            return
        ready = min(end, max([start, *(self.nodes[source][6] for source in sources if source >= 0)]))
        self.host = self.add(Kind.WAIT, HOST_LANE, -1, start, ready, start, end)
        self.need(self.host, *sorted(set(sources)))
        self.resumed = end

    # What the log holds, by kind.

    def call(self, row: Any, at: int) -> None:
        self.host_span(row["before"])
        stream = self.stream(row["stream"])
        span = self.stream_span(stream, at, row)
        self.open[row["thread"]] = _Open(stream, span, self.host, row["issued"], self.nodes[span][6])

    def leave(self, row: Any, at: int) -> None:
        opened = self.open.pop(row["thread"])
        lane = self.streams.get(row["stream"]) or self.backend_stream(row["stream"])
        ready = opened.ready if lane is opened.stream else max(opened.ready, lane.end)
        launched = self.members.get(row["node"], [row["node"]] if row["node"] >= 0 else [])
        for source in launched:
            node = self.add(Kind.COMM, lane.lane, source, opened.issued, ready, ready, at)
            self.made[source] = node
            self.need(node, opened.host, *([] if lane is opened.stream else [opened.span]))
            lane.last, lane.end = node, self.nodes[node][6]
        if len(launched) > 1:  # a batch is over, and its event there, when all of it is
            lane.last = self.add(Kind.WAIT, lane.lane, -1, opened.issued, lane.end, lane.end, lane.end)
        for event, stream in opened.events:
            self.event[event] = lane.last if stream == row["stream"] else opened.span
        self.resumed = max(self.resumed, row["after"])

    def within(self, opened: _Open, row: Any, at: int) -> None:
        """A row of the backend's own, inside an operation: events on the operation's stream stand for it, others, which
        hand over to the backend's stream, for what the caller had done."""
        if row["kind"] == RECORD:
            opened.events.append((row["event"], row["stream"]))

    def record(self, row: Any, at: int) -> None:
        self.host_span(row["before"])
        stream = self.stream(row["stream"])
        self.stream_span(stream, at, row)
        self.event[row["event"]] = self.point(Kind.WAIT, stream, row["before"])
        self.resumed = max(self.resumed, row["after"])

    def wait(self, row: Any, at: int) -> None:
        self.host_span(row["before"])
        stream = self.stream(row["stream"])
        self.stream_span(stream, at, row)
        self.point(Kind.WAIT, stream, row["before"], waits_for=self.event.get(row["event"], -1))
        self.resumed = max(self.resumed, row["after"])

    def sync_stream(self, row: Any, at: int) -> None:
        self.host_span(row["before"])
        stream = self.stream(row["stream"])
        reached = self.stream_span(stream, at, row)
        self.host_wait(row["before"], row["after"], reached)
        stream.launch = self.host

    def sync_event(self, row: Any, at: int) -> None:
        self.host_span(row["before"])
        self.host_wait(row["before"], row["after"], self.event.get(row["event"], -1))

    def device_point(self, row: Any, at: int) -> None:
        if not self.points:
            self.host_span(row["before"])
        stream = self.stream(row["stream"])
        self.points.append(self.stream_span(stream, at, row))

    def sync_device(self, row: Any, at: int) -> None:
        if not self.points:
            self.host_span(row["before"])
        self.host_wait(row["before"], row["after"], *self.points, *(lane.last for lane in self.backend.values()))
        self.points = []
        for stream in self.streams.values():
            stream.launch = self.host

    def mark(self, row: Any, at: int) -> None:
        self.host_span(row["before"])
        stream = self.stream(row["stream"])
        self.stream_span(stream, at, row)
        self.made[row["node"]] = self.point(Kind.MARK, stream, row["before"], source=row["node"])
        self.resumed = max(self.resumed, row["after"])

    def host_event(self, source: int, resumes: int) -> None:
        """A node that the tracer made on the host or in gloo's pool."""
        times = self.trace["times"][source]
        lane = POOL_LANE if self.trace["columns"]["lane"][source] == POOL_LANE else HOST_LANE
        kind = int(self.trace["columns"]["kind"][source])
        self.host_span(int(times[2] if kind != Kind.COMM else self.trace["times"][source - 1, 3]))
        before = self.host
        node = self.add(kind, lane, source, *(int(x) for x in times))
        self.nodes[node] = (*self.nodes[node][:6], int(times[3]))  # -1: unknown
        self.made[source] = node
        if lane == POOL_LANE:
            self.need(node, before)
        else:
            self.host = node
        if kind == Kind.WAIT:
            edges = self.trace["edges"]
            self.need(node, *(self.made.get(int(s), -1) for s, t in edges[edges[:, 1] == source]))
        self.resumed = resumes


def _batches(trace: dict[str, Any]) -> dict[int, list[int]]:
    """The operations of each group that the backend launched as one, by its first."""
    batch, lane = trace["columns"]["batch"], trace["columns"]["lane"]
    found: dict[int, list[int]] = {}
    for node in np.flatnonzero((batch >= 0) & (lane > POOL_LANE)).tolist():
        found.setdefault(int(batch[node]), []).append(node)
    return {nodes[0]: nodes for nodes in found.values()}


def _host_events(trace: dict[str, Any], logged: set[int]) -> list[tuple[int, int, int]]:
    """(time, tracer's node, when the host went on) of every node that is not in the device's log."""
    kind, times, lane = trace["columns"]["kind"], trace["times"], trace["columns"]["lane"]
    spans = np.flatnonzero(kind == Kind.COMPUTE)
    after = np.searchsorted(spans, np.arange(len(kind)))
    found = []
    for node in np.flatnonzero((kind != Kind.COMPUTE) & (lane <= POOL_LANE)).tolist():
        if node not in logged:
            next_span = spans[after[node]] if after[node] < len(spans) else -1
            resumes = times[next_span, 2] if next_span >= 0 else times[node].max()
            at = times[node - 1, 3] if kind[node] == Kind.COMM else times[node, 2]
            found.append((int(at), node, int(resumes)))
    return found


def with_lanes(trace: dict[str, Any]) -> dict[str, Any]:
    """The trace of a rank with a device's log (capture/device.py: ``rows``, ``stamps``) as one without: its nodes on all
    lanes, in the order in which the host called. ``lanes``: their names. Operations that never returned are left out."""
    rows, stamps = trace["rows"].copy(), trace["stamps"]
    operations = np.isin(rows["kind"], (CALL, RETURN)) & (rows["node"] >= 0)
    rows["node"][operations] += trace["first_operation"]  # the log counts operations, the trace all nodes
    logged = set(rows["node"][rows["kind"] == MARK].tolist())
    events: list[tuple[int, int, int, int]] = [
        (int(rows["before"][k]), 0, int(rows["kind"][k]), k) for k in range(len(rows))
    ]
    resumes = {}
    for at, node, goes_on in _host_events(trace, logged):
        resumes[node] = goes_on
        events.append((at, 1, HOST_EVENT, node))
    builder = _Builder(trace)
    builder.resumed = int(trace["times"][0, 2]) if len(trace["times"]) else 0
    handlers = {
        CALL: builder.call, RETURN: builder.leave, RECORD: builder.record, WAIT: builder.wait, MARK: builder.mark,
        SYNC_STREAM: builder.sync_stream, SYNC_EVENT: builder.sync_event, SYNC_DEVICE: builder.sync_device,
        POINT: builder.device_point,
    }  # fmt: skip
    plain = [{name: int(row[name]) for name in rows.dtype.names} for row in rows]
    for _, _, kind, which in sorted(events):
        if kind == HOST_EVENT:
            builder.host_event(which, resumes[which])
            continue
        row = plain[which]
        at = int(stamps[row["stamp"]]) if row["stamp"] >= 0 else 0
        opened = builder.open.get(row["thread"])
        if opened is not None and kind != RETURN:
            builder.within(opened, row, at)
        elif kind != RETURN or opened is not None:
            handlers[kind](row, at)
    return _finish(trace, builder)


def _finish(trace: dict[str, Any], builder: _Builder) -> dict[str, Any]:
    nodes = np.array(builder.nodes, np.int64).reshape(-1, 7)
    source = nodes[:, 2]
    known = source >= 0
    blank = {"kind": 0, "op": Op.NONE, "reduce": 0}
    columns = {}
    for name in NAMES:
        column = np.full(len(nodes), blank.get(name, -1), NODE_COLUMNS[name])
        column[known] = trace["columns"][name][source[known]]
        columns[name] = column
    columns["kind"], columns["lane"] = nodes[:, 0].astype(np.uint8), nodes[:, 1].astype(np.int16)
    values = {}
    for name, unknown in (("bytes", 0), ("count", 0), ("tag", -1), ("issue", 0)):
        values[name] = np.full(len(nodes), unknown, np.int64)
        values[name][known] = trace[name][source[known]]
    offset = trace["split_offset"]
    splits = [trace["splits"][offset[s] : offset[s + 1]] if s >= 0 else [] for s in source]
    return {
        **{name: value for name, value in trace.items() if name not in ("rows", "stamps")},
        **values,
        "columns": columns,
        "edges": np.array(builder.edges, np.int32).reshape(-1, 2),
        "splits": np.array([x for row in splits for x in row], np.int64),
        "split_offset": np.concatenate([[0], np.cumsum([len(row) for row in splits])]).astype(np.int64),
        "times": nodes[:, 3:7].copy(),
        "lanes": builder.lanes,
    }
