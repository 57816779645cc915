"""The tracer: one rank's nodes in program order with their times, as plain lists until the rank is done (design §2, §4)."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from time import monotonic_ns as now
from typing import Any

import numpy as np

from prism_tools.capture.calls import Call
from prism_tools.capture.callsite import CallSites
from prism_tools.capture.wire import dtype_name
from prism_tools.graph.schema import DTYPES, HOST_LANE, NODE_COLUMNS, UNKNOWN, Kind, Op

POOL_LANE = 1  # gloo's thread pool; graph lanes are ["host", "gloo"] on CPU
DEVICE_LANE = 2  # until the device's log is read (capture/lanes.py): a lane of its own, on a device
LANES = ["host", "gloo"]
Described = tuple[tuple[int, ...], tuple[int, int, int], tuple[int, ...]]  # columns, values, splits of an operation
_DTYPE = {name: index for index, name in enumerate(DTYPES)}


_NAMES = [name for name in NODE_COLUMNS if name != "segment"]
_WIDTH = len(_NAMES)
_LANE, _SLOT, _PEER, _CALLSITE = (_NAMES.index(name) for name in ("lane", "slot", "peer", "callsite"))


class Tracer:
    """Appends nodes; columns as in schema.NODE_COLUMNS, ``peer`` an absolute group rank until it is exported.

    Everything is a flat array of numbers: millions of small objects would make Python's collector slow the program.
    Time spent in here, and in playing an absent rank, belongs to no node: the next one begins after it. ``debt`` is how far
    this rank is behind an untraced one for that reason; a wait that has time to spare pays it back.
    ``issue_cost``: ns that the real backend takes to issue each op (replay; {} elsewhere).
    """

    def __init__(self, issue_cost: dict[int, int] | None = None) -> None:
        self.debt = 0
        self.issue_cost = issue_cost or {}
        self.sites = CallSites()
        self.count = 0
        self._columns = array("i")  # _WIDTH a node
        self._values = array("q")  # bytes, count, tag
        self._times = array("q")  # host_issue, ready, start, end
        self._edges = array("i")  # source, target
        self._issue = array("q")  # ns that the call took in the backend
        self._splits: dict[int, tuple[int, ...]] = {}
        self.late: list[tuple[int, int]] = []  # node, ns after the time at which it should have ended
        self.batch = -1
        self.batches = 0
        self.host_end = now()
        self.last_host = -1

    def _append(self, columns: tuple[int, ...], values: tuple[int, int, int], start: int, end: int) -> int:
        self._columns.extend(columns)
        self._values.extend(values)
        self._times.extend((start, start, start, end))
        self._issue.append(0)
        self.count += 1
        return self.count - 1

    def _host(self, kind: Kind, op: Op, site: int, start: int, end: int) -> None:
        """A node of the host's lane."""
        columns = (kind, op, HOST_LANE, -1, -1, -1, -1, 0, -1, site)
        self.last_host = self._append(columns, (0, 0, -1), start, end)
        self.host_end = end

    def _span(self, until: int) -> None:
        """The host computed from the end of its last node until ``until``."""
        self._host(Kind.COMPUTE, Op.NONE, -1, min(self.host_end, until), until)

    def comm(self, call: Call, slot: int, called: int = 0) -> int:
        """An operation was called (at ``called``; 0: now): a node on the pool's lane until its caller blocks at once."""
        called = called or now()
        self._span(called)
        before = self.last_host
        node = self.operation(call, slot, POOL_LANE, called)
        self._edges.extend((before, node))
        self.host_end = self._times[4 * node] = self._times[4 * node + 1] = self._times[4 * node + 2] = issue = now()
        self.debt += issue - called
        return node

    def operation(self, call: Call, slot: int, lane: int, called: int) -> int:
        """The node of an operation alone: no span before it, no edge."""
        columns, values, splits = self.describe(call, slot, lane)
        node = self._append(columns, values, called, -1)
        if splits:
            self._splits[node] = splits
        return node

    def describe(self, call: Call, slot: int, lane: int) -> Described:
        """An operation's columns, values and splits, without making a node of it."""
        payload = call.ins or call.outs
        size = count = 0
        for tensor in payload:
            elements = tensor.numel()
            count += elements
            size += elements * tensor.element_size()
        dtype = _DTYPE.get(dtype_name(payload[0].dtype), -1) if payload else -1
        site = self.sites.here()
        splits: tuple[int, ...] = ()
        if call.op is Op.ALL_TO_ALL:
            splits = call.splits or tuple(t.numel() * t.element_size() for t in (*call.ins, *call.outs))
        columns = (Kind.COMM, call.op, lane, slot, call.peer, call.root, dtype, call.reduce, self.batch, site)
        return columns, (size, count, call.tag), splits

    def withdraw(self, node: int) -> None:
        """The backend refused the newest operation: it has not happened."""
        if node != self.count - 1:
            return
        del self._columns[-_WIDTH:], self._values[-3:], self._times[-4:], self._issue[-1:]
        if len(self._edges) and self._edges[-1] == node:
            del self._edges[-2:]
        self._splits.pop(node, None)
        self.count -= 1

    def handed_over(self, node: int, op: Op, returned: int, played: bool) -> None:
        """The backend took the operation and returned; ``played``: it was our own data plane, whose cost is not the job's."""
        issue = self._times[4 * node]
        cost = self.issue_cost.get(op, 0) if played else returned - issue
        here = now()
        self._issue[node] = returned - issue
        self.host_end = here if played else here - cost
        self.debt += here - issue - cost

    def issued_at(self, node: int) -> int:
        """When the host called the operation."""
        return self._times[4 * node]

    def site_of(self, node: int) -> int:
        """The call site of an operation."""
        return self._columns[_WIDTH * node + _CALLSITE]

    def completed(self, node: int, at: int) -> None:
        """The operation's results are there (may be called from another thread). A played one may have ended, by the time
        that the rank would have kept without our own work (``debt``), before the rank has called it."""
        if self._times[4 * node + 3] < 0:
            self._times[4 * node + 3] = max(at, self._times[4 * node])

    def waited(self, node: int, entered: int, by_torch: bool, planned: int = 0) -> None:
        """The host has waited for ``node``: a synchronous operation becomes one host node, else a WAIT node follows.

        ``planned``: when a played operation ends (0: a real one, which has ended now).
        """
        back = now()
        left = back
        if planned:
            left = max(entered, planned)
            self.debt = max(0, back - max(entered - self.debt, planned))
        self.completed(node, left)
        if by_torch and node == self.count - 1 and self._columns[_WIDTH * node + _LANE] == POOL_LANE:
            self._columns[_WIDTH * node + _LANE] = HOST_LANE
            del self._edges[-2:]
            self._times[4 * node + 3] = max(self._times[4 * node], planned) if planned else left
            self.last_host = node
        else:
            self._span(entered)
            self._host(Kind.WAIT, Op.NONE, self.sites.here(), entered, left)
            self._edges.extend((node, self.last_host))
        self.host_end = now()
        self.debt += self.host_end - back

    def mark(self, op: Op) -> None:
        """An optimizer step has ended."""
        at = now()
        self._span(at)
        self._host(Kind.MARK, op, self.sites.here(), at, at)
        self.host_end = now()
        self.debt += self.host_end - at

    def source(self, node: int, peer: int) -> None:
        """An any-source receive was matched with ``peer``."""
        self._columns[_WIDTH * node + _PEER] = peer

    def export(self, rank: int, groups: list[tuple[int, ...]], apart: Sequence[Described] = ()) -> dict[str, Any]:
        """Everything as numpy arrays: {columns, edges, bytes, count, tag, splits, split_offset, times,
        issue, sites, late}.

        ``groups``: the members of each slot, which make peers relative to this rank. ``apart``: operations described
        elsewhere (capture/device.py), which become the last nodes, without times.
        """
        for described, amounts, pieces in apart:
            self._splits[self._append(described, amounts, UNKNOWN, UNKNOWN)] = pieces
        table = np.array(self._columns, np.int32).reshape(-1, _WIDTH)
        for node in np.flatnonzero(table[:, _PEER] >= 0):
            members = groups[table[node, _SLOT]]
            table[node, _PEER] = (table[node, _PEER] - members.index(rank)) % len(members)
        times = np.array(self._times, np.int64).reshape(-1, 4)
        edges = np.array(self._edges, np.int32).reshape(-1, 2)
        waits = edges[table[edges[:, 1], 0] == Kind.WAIT]
        np.maximum.at(times[:, 1], waits[:, 1], times[waits[:, 0], 3])  # ready when what it waits for has ended
        values = np.array(self._values, np.int64).reshape(-1, 3)
        splits = [self._splits.get(node, ()) for node in range(self.count)]
        return {
            "columns": {name: table[:, k].astype(NODE_COLUMNS[name]) for k, name in enumerate(_NAMES)},
            "edges": edges,
            "bytes": values[:, 0].copy(),
            "count": values[:, 1].copy(),
            "tag": values[:, 2].copy(),
            "splits": np.array([x for row in splits for x in row], np.int64),
            "split_offset": np.concatenate([[0], np.cumsum([len(row) for row in splits])]).astype(np.int64),
            "times": times,
            "issue": np.array(self._issue, np.int64),
            "sites": self.sites.texts,
            "late": self.late,
        }


def called_by_torch(depth: int) -> bool:
    """Whether frame ``depth`` above the caller is torch.distributed's own "issue, then wait" code."""
    code = sys._getframe(depth + 1).f_code
    return code.co_filename.endswith("distributed_c10d.py") and code.co_qualname != "_CoalescingManager.wait"
