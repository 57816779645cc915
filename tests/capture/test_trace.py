"""The tracer's rules: which nodes and edges an operation becomes, and with which times."""

import time

import numpy as np
import pytest
import torch

from prism_tools.capture import trace
from prism_tools.capture.calls import Call
from prism_tools.capture.trace import Tracer
from prism_tools.graph.schema import DTYPES, Kind, Op, Reduce
from prism_tools.graph.segments import find_segments

HOST, POOL = 0, 1


@pytest.fixture
def clock(monkeypatch):
    """A clock that moves 10 ns every time it is read."""
    ticks = iter(range(1000, 10**9, 10))
    monkeypatch.setattr(trace, "now", lambda: next(ticks))


def kinds_and_lanes(exported):
    columns = exported["columns"]
    return [(Kind(kind).name, lane) for kind, lane in zip(columns["kind"], columns["lane"], strict=True)]


def all_reduce(**more):
    tensors = [torch.ones(3), torch.ones(2, 2)]
    return Call(Op.ALL_REDUCE, tensors, tensors, Reduce.SUM, **more)


def test_a_synchronous_operation_is_one_host_node(clock):
    tracer = Tracer()
    node = tracer.comm(all_reduce(), 0)
    tracer.waited(node, 1025, by_torch=True)
    exported = tracer.export(0, [(0, 1)])
    assert kinds_and_lanes(exported) == [("COMPUTE", HOST), ("COMM", HOST)]
    assert exported["edges"].tolist() == []
    # Called at 1010; tracing it took until 1020 and belongs to no node; it ended at 1030.
    assert exported["times"].tolist() == [[1000, 1000, 1000, 1010], [1020, 1020, 1020, 1030]]
    assert tracer.debt == 20  # from 1010 to 1020, and from 1030 to 1040


def test_a_played_operation_never_ends_before_its_start(clock):
    """Planned on the time without what playing costs, it may be over when the rank, which has that time still to lose, calls it."""
    tracer = Tracer({})
    node = tracer.comm(all_reduce(), 0)
    tracer.completed(node, 900)
    tracer.waited(node, 1025, by_torch=False, planned=900)
    assert tracer.export(0, [(0, 1)])["times"].tolist() == [
        [1000, 1000, 1000, 1010],
        [1020, 1020, 1020, 1020],
        [1020, 1020, 1020, 1025],
        [1025, 1025, 1025, 1025],
    ]


def test_an_asynchronous_operation_is_a_pool_node_and_a_wait(clock):
    tracer = Tracer()
    node = tracer.comm(all_reduce(), 0)
    tracer.completed(node, 5000)
    tracer.completed(node, 6000)  # the first stamp counts
    tracer.waited(node, 1025, by_torch=False)
    exported = tracer.export(0, [(0, 1)])
    assert kinds_and_lanes(exported) == [("COMPUTE", HOST), ("COMM", POOL), ("COMPUTE", HOST), ("WAIT", HOST)]
    assert exported["edges"].tolist() == [[0, 1], [1, 3]]
    # The wait entered at 1025 and was ready when the operation had ended.
    assert exported["times"].tolist() == [
        [1000, 1000, 1000, 1010],
        [1020, 1020, 1020, 5000],
        [1020, 1020, 1020, 1025],
        [1025, 5000, 1025, 1030],
    ]


def test_the_real_backend_s_issue_belongs_to_the_job_and_ours_does_not(clock):
    tracer = Tracer({Op.ALL_REDUCE: 3})
    real = tracer.comm(all_reduce(), 0)  # called 1010, issued 1020
    tracer.handed_over(real, Op.ALL_REDUCE, returned=1026, played=False)  # now 1030
    assert (tracer.debt, tracer.host_end) == (10 + 4, 1024)  # the next span holds the 6 ns of the backend
    played = tracer.comm(all_reduce(), 0)  # called 1040, issued 1050
    tracer.handed_over(played, Op.ALL_REDUCE, returned=1058, played=True)  # now 1060
    assert (tracer.debt, tracer.host_end) == (14 + 10 + 7, 1060)  # the real backend would have taken 3
    assert tracer.export(0, [(0, 1)])["issue"][[real, played]].tolist() == [6, 8]


def test_a_wait_with_time_to_spare_pays_the_debt_back(clock):
    tracer = Tracer({})
    node = tracer.comm(all_reduce(), 0)
    tracer.debt = 100
    tracer.waited(node, 1025, by_torch=False, planned=1030)  # back at 1030, as planned
    assert tracer.debt == 10  # only what came after
    assert tracer.export(0, [(0, 1)])["times"][-1].tolist() == [1025, 1030, 1025, 1030]
    tracer.debt = 100
    late = tracer.comm(all_reduce(), 0)  # called 1050, issued 1060, so 110 ns behind
    tracer.waited(late, 1065, by_torch=False, planned=900)  # its results had been there for long; back at 1070
    assert tracer.debt == 1070 - (1065 - 110) + 10
    assert tracer.export(0, [(0, 1)])["times"][-1, 2:].tolist() == [1065, 1065]


def test_a_wait_by_torch_is_asynchronous_once_something_came_between(clock):
    tracer = Tracer()
    first, second = tracer.comm(all_reduce(), 0), tracer.comm(all_reduce(), 0)
    tracer.waited(first, 1030, by_torch=True)
    tracer.waited(second, 1050, by_torch=True)
    exported = tracer.export(0, [(0, 1)])
    expected = [HOST, POOL, HOST, POOL, HOST, HOST, HOST, HOST]
    assert [lane for _, lane in kinds_and_lanes(exported)] == expected
    assert exported["edges"].tolist() == [[0, 1], [2, 3], [1, 5], [3, 7]]


def test_the_host_s_events_alternate_with_spans():
    tracer = Tracer()
    tracer.waited(tracer.comm(all_reduce(), 0), time.monotonic_ns(), by_torch=True)
    node = tracer.comm(all_reduce(), 0)
    tracer.mark(Op.OPTIMIZER_STEP)
    tracer.waited(node, time.monotonic_ns(), by_torch=False)
    exported = tracer.export(0, [(0, 1)])
    columns, times = exported["columns"], exported["times"]
    host = np.flatnonzero(columns["lane"] == HOST)
    assert [Kind(kind).name for kind in columns["kind"][host]] == [
        *("COMPUTE", "COMM", "COMPUTE"),
        *("COMPUTE", "MARK", "COMPUTE", "WAIT"),  # an issue leaves no host node behind
    ]
    gaps = times[host][1:, 2] - times[host][:-1, 3]
    assert (gaps >= 0).all() and gaps.sum() <= tracer.debt  # only tracing lies between them
    assert (times[:, 0] <= times[:, 1]).all() and (times[:, 2] <= times[:, 3]).all()


def test_columns_and_values():
    tracer = Tracer()
    tracer.batch = 4
    sent = torch.zeros(6, dtype=torch.bfloat16)
    tracer.comm(Call(Op.SEND, [sent], peer=0, tag=7), 1)
    tracer.batch = -1
    tracer.comm(Call(Op.BARRIER), 0)
    tracer.comm(Call(Op.BROADCAST, outs=[torch.zeros(5)], root=2), 0)
    exported = tracer.export(5, [(3, 4, 5), (4, 5)])
    columns = exported["columns"]
    comm = np.flatnonzero(columns["kind"] == Kind.COMM)
    picked = {name: columns[name][comm].tolist() for name in ("op", "slot", "peer", "root", "reduce", "batch")}
    assert picked == {
        "op": [Op.SEND, Op.BARRIER, Op.BROADCAST],
        "slot": [1, 0, 0],
        "peer": [1, -1, -1],  # group rank 0 seen from group rank 1 of two
        "root": [-1, -1, 2],
        "reduce": [0, 0, 0],
        "batch": [4, -1, -1],
    }
    assert columns["dtype"][comm].tolist() == [DTYPES.index("bfloat16"), -1, DTYPES.index("float32")]
    assert exported["tag"][comm].tolist() == [7, -1, -1]
    assert exported["bytes"][comm].tolist() == [12, 0, 20]
    assert exported["count"][comm].tolist() == [6, 0, 5]


def test_splits_of_an_all_to_all_are_bytes_to_and_from_each_member():
    tracer = Tracer()
    ins = [torch.zeros(1), torch.zeros(0), torch.zeros(3)]
    outs = [torch.zeros(1), torch.zeros(2), torch.zeros(2)]
    node = tracer.comm(Call(Op.ALL_TO_ALL, ins, outs), 0)
    exported = tracer.export(0, [(0, 1, 2)])
    offset = exported["split_offset"]
    assert exported["splits"][offset[node] : offset[node + 1]].tolist() == [4, 0, 12, 4, 8, 8]
    assert len(exported["splits"]) == 6 and exported["bytes"][node] == 16


def test_an_any_source_receive_gets_its_peer():
    tracer = Tracer()
    node = tracer.comm(Call(Op.RECV, outs=[torch.zeros(1)], peer=-1), 0)
    tracer.source(node, 0)
    assert tracer.export(3, [(1, 2, 3, 9)])["columns"]["peer"][node] == 2


def test_call_sites_are_the_program_s():
    tracer = Tracer()
    site = tracer.sites.here()
    text = tracer.export(0, [])["sites"][site]
    assert text.split(":")[0].endswith("test_trace.py") and text.endswith(" test_call_sites_are_the_program_s")


def test_segments_follow_the_marks(clock):
    tracer = Tracer()
    tracer.waited(tracer.comm(Call(Op.BARRIER), 0), 0, by_torch=True)
    for _ in range(3):
        node = tracer.comm(all_reduce(), 0)
        tracer.waited(node, 0, by_torch=False)
        tracer.mark(Op.OPTIMIZER_STEP)
    tracer.waited(tracer.comm(Call(Op.BARRIER), 0), 0, by_torch=True)
    columns = tracer.export(0, [(0, 1)])["columns"]
    assert find_segments(columns).tolist() == [-1] * 2 + [0] * 6 + [1] * 6 + [2] * 6 + [-2] * 2
