"""The tracer: one rank's nodes in program order with their times, as plain lists until the rank is done (design §2, §4)."""

from __future__ import annotations

import sys
from time import monotonic_ns as now
from typing import Any

import numpy as np

from prism_tools.capture.calls import Call
from prism_tools.capture.callsite import CallSites
from prism_tools.graph.schema import DTYPES, HOST_LANE, NODE_COLUMNS, Kind, Op

POOL_LANE = 1  # gloo's thread pool; graph lanes are ["host", "gloo"] on CPU
LANES = ["host", "gloo"]
_DTYPE = {name: index for index, name in enumerate(DTYPES)}


class Tracer:
    """Appends nodes; columns as in schema.NODE_COLUMNS, ``peer`` an absolute group rank until it is exported."""

    def __init__(self) -> None:
        self.sites = CallSites()
        self.nodes: list[list[int]] = []  # kind, op, lane, slot, peer, root, dtype, reduce, batch, callsite
        self.values: list[tuple[int, int, int, tuple[int, ...]]] = []  # bytes, count, tag, splits
        self.times: list[list[int]] = []  # host_issue, ready, start, end
        self.edges: list[tuple[int, int]] = []
        self.late: list[tuple[int, int]] = []  # node, ns after the time at which it should have ended
        self.batch = -1
        self.batches = 0
        self.host_end = now()
        self.last_host = -1

    def _append(self, node: list[int], values: tuple, times: list[int]) -> int:
        self.nodes.append(node)
        self.values.append(values)
        self.times.append(times)
        return len(self.nodes) - 1

    def _span(self, until: int) -> None:
        """The host computed from the end of its last node until ``until``."""
        begin = self.host_end
        node = [Kind.COMPUTE, Op.NONE, HOST_LANE, -1, -1, -1, -1, 0, -1, -1]
        self.last_host = self._append(node, (0, 0, -1, ()), [begin, begin, begin, until])
        self.host_end = until

    def comm(self, call: Call, slot: int) -> int:
        """An operation was called: a node on the pool's lane until its caller turns out to block at once."""
        issue = now()
        self._span(issue)
        payload = call.ins or call.outs
        size = count = 0
        for tensor in payload:
            elements = tensor.numel()
            count += elements
            size += elements * tensor.element_size()
        dtype = _DTYPE.get(str(payload[0].dtype)[6:], -1) if payload else -1
        splits: tuple[int, ...] = ()
        if call.op is Op.ALL_TO_ALL:
            splits = tuple(t.numel() * t.element_size() for t in (*call.ins, *call.outs))
        columns = [Kind.COMM, call.op, POOL_LANE, slot, call.peer, call.root, dtype, call.reduce, self.batch]
        node = self._append([*columns, self.sites.here()], (size, count, call.tag, splits), [issue, issue, issue, -1])
        self.edges.append((self.last_host, node))
        return node

    def completed(self, node: int, at: int) -> None:
        """The operation's results are there (may be called from another thread)."""
        if self.times[node][3] < 0:
            self.times[node][3] = at

    def waited(self, node: int, entered: int, by_torch: bool) -> None:
        """The host has waited for ``node``: a synchronous operation becomes one host node, else a WAIT node follows."""
        left = now()
        self.completed(node, left)
        if by_torch and node == len(self.nodes) - 1 and self.nodes[node][2] == POOL_LANE:
            self.nodes[node][2] = HOST_LANE
            self.edges.pop()
            self.times[node][3] = left
            self.last_host = node
        else:
            self._span(entered)
            wait = [Kind.WAIT, Op.NONE, HOST_LANE, -1, -1, -1, -1, 0, -1, self.sites.here()]
            self.last_host = self._append(wait, (0, 0, -1, ()), [entered, entered, entered, left])
            self.edges.append((node, self.last_host))
        self.host_end = left

    def mark(self, op: Op) -> None:
        """An optimizer step has ended."""
        at = now()
        self._span(at)
        node = [Kind.MARK, op, HOST_LANE, -1, -1, -1, -1, 0, -1, self.sites.here()]
        self.last_host = self._append(node, (0, 0, -1, ()), [at, at, at, at])

    def source(self, node: int, peer: int) -> None:
        """An any-source receive was matched with ``peer``."""
        self.nodes[node][4] = peer

    def export(self, rank: int, groups: list[tuple[int, ...]]) -> dict[str, Any]:
        """Everything as numpy arrays: {columns, edges, bytes, count, tag, splits, split_offset, times, sites}.

        ``groups``: the members of each slot, which make peers relative to this rank.
        """
        names = [name for name in NODE_COLUMNS if name != "segment"]
        table = np.array(self.nodes, np.int32).reshape(-1, len(names))
        for index in np.flatnonzero(table[:, 4] >= 0):
            members = groups[table[index, 3]]
            table[index, 4] = (table[index, 4] - members.index(rank)) % len(members)
        times = np.array(self.times, np.int64).reshape(-1, 4)
        edges = np.array(self.edges, np.int32).reshape(-1, 2)
        for source, target in self.edges:
            if self.nodes[target][0] == Kind.WAIT:  # ready when what it waits for has ended
                times[target, 1] = max(times[target, 1], times[source, 3])
        splits = [row[3] for row in self.values]
        return {
            "columns": {name: table[:, k].astype(NODE_COLUMNS[name]) for k, name in enumerate(names)},
            "edges": edges,
            "bytes": np.array([row[0] for row in self.values], np.int64),
            "count": np.array([row[1] for row in self.values], np.int64),
            "tag": np.array([row[2] for row in self.values], np.int64),
            "splits": np.array([x for row in splits for x in row], np.int64),
            "split_offset": np.concatenate([[0], np.cumsum([len(row) for row in splits])]).astype(np.int64),
            "times": times,
            "sites": self.sites.texts,
            "late": self.late,
        }


def called_by_torch(depth: int) -> bool:
    """Whether frame ``depth`` above the caller is torch.distributed's own "issue, then wait" code."""
    code = sys._getframe(depth + 1).f_code
    return code.co_filename.endswith("distributed_c10d.py") and code.co_qualname != "_CoalescingManager.wait"
