"""Lane and edge rules: on small logs made by hand, and on what two H200s logged of real programs (tests/golden/live)."""

import argparse
from pathlib import Path

import numpy as np
import pytest

from prism_tools.calibrate import calibrate
from prism_tools.capture.calls import Call
from prism_tools.capture.lanes import with_lanes
from prism_tools.capture.trace import DEVICE_LANE, Tracer
from prism_tools.gpu import stamp
from prism_tools.graph.check import check
from prism_tools.graph.iterations import counted, iteration_times
from prism_tools.graph.match import find_matches
from prism_tools.graph.model import Program
from prism_tools.graph.order import predecessors
from prism_tools.graph.schema import Kind, Op
from prism_tools.record.live import live_graph, read_shards

GOLDEN = Path(__file__).parents[1] / "golden" / "live"
MAIN, SIDE, NCCL = 0x0, 0x10, 0x20
HOST_NS = 10  # what every call takes the host


class Log:
    """A rank's log by hand: the host calls every 100 ns, takes HOST_NS for each call, and says when streams got there."""

    def __init__(self):
        self.tracer, self.rows, self.stamps, self.now = Tracer(), [], [], 0

    def row(self, kind, stream=MAIN, event=0, at=None, node=-1, takes=HOST_NS):
        self.now += 100
        number = -1 if at is None else len(self.stamps)
        self.stamps += [] if at is None else [at]
        self.rows.append((self.now, self.now + 1, self.now + takes, stream, event, kind, number, 0, node))

    def operation(self, op=Op.ALL_REDUCE, at=0, on=None, end=0, event=1, count=1):
        """`count` operations launched as one: called when MAIN got to `at`, run on stream `on` until `end`."""
        self.tracer.batch = self.tracer.batches if count > 1 else -1
        nodes = [self.tracer.operation(Call(op), 0, DEVICE_LANE, 0) for _ in range(count)]
        self.tracer.batches, self.tracer.batch = self.tracer.batches + 1, -1
        self.row(stamp.CALL, at=at, node=nodes[0])
        if on != MAIN:
            self.row(stamp.RECORD, MAIN, 99)  # handed over: not stamped
            self.row(stamp.WAIT, on, 99)
        self.row(stamp.RECORD, on, event)
        self.row(stamp.RETURN, on, at=end, node=nodes[0])
        self.rows[-1] = (*self.rows[-1][:2], self.rows[-1][0], *self.rows[-1][3:])

    def step(self, at):
        self.tracer.mark(Op.OPTIMIZER_STEP)
        self.row(stamp.MARK, at=at, node=self.tracer.count - 1)

    def made(self):
        trace = self.tracer.export(0, [(0, 1)])
        trace["times"][:] = 0
        rows = np.array(self.rows, stamp.ROW)
        return with_lanes({**trace, "rows": rows, "stamps": np.array(self.stamps, np.int64), "first_operation": 0})

    def nodes(self):
        """[(lane, kind, op, ready, end, [what it needs])]"""
        made = self.made()
        needs = [sorted(int(s) for s, t in made["edges"] if t == node) for node in range(len(made["times"]))]
        columns = made["columns"]
        return [
            (made["lanes"][lane], Kind(kind).name, Op(op).name, int(ready), int(end), need)
            for lane, kind, op, (_, ready, _, end), need in zip(
                columns["lane"], columns["kind"], columns["op"], made["times"], needs, strict=True
            )
        ]


def test_an_asynchronous_operation_runs_on_the_backends_stream_and_the_caller_waits_for_it():
    log = Log()
    log.operation(at=1000, on=NCCL, end=5000, event=7)
    log.row(stamp.WAIT, MAIN, 7, at=3000)
    assert log.nodes() == [
        ("host", "COMPUTE", "NONE", 0, 100, []),
        ("stream 0", "COMPUTE", "NONE", 100, 1000, [0]),
        ("nccl 0", "COMM", "ALL_REDUCE", 1000, 5000, [0, 1]),
        ("host", "COMPUTE", "NONE", 500, 600, []),
        ("stream 0", "COMPUTE", "NONE", 1000, 3000, [0]),
        ("stream 0", "WAIT", "NONE", 5000, 5000, [2, 3]),
    ]


def test_a_synchronous_operation_runs_on_its_callers_stream():
    log = Log()
    log.operation(at=1000, on=MAIN, end=5000)
    log.operation(at=5500, on=MAIN, end=6000)
    nodes = log.nodes()
    assert [node[:2] for node in nodes[1:3]] == [("stream 0", "COMPUTE"), ("stream 0", "COMM")]
    assert nodes[2] == ("stream 0", "COMM", "ALL_REDUCE", 1000, 5000, [0])
    assert nodes[4][3:5] == (5000, 5500), "the span after it begins where it ends"


def test_operations_of_one_stream_of_the_backend_queue():
    log = Log()
    log.operation(at=1000, on=NCCL, end=5000)
    log.operation(at=2000, on=NCCL, end=6000)
    first, second = (node for node in log.nodes() if node[1] == "COMM")
    assert (first[3:5], second[3:5]) == ((1000, 5000), (5000, 6000))


def test_a_recorded_event_is_a_point_that_other_streams_wait_for():
    log = Log()
    log.row(stamp.RECORD, MAIN, 5, at=4000)
    log.row(stamp.WAIT, SIDE, 5, at=1000)
    log.row(stamp.WAIT, MAIN, 5, at=4100)
    nodes = log.nodes()
    assert nodes[2] == ("stream 0", "WAIT", "NONE", 4000, 4000, [0])
    assert nodes[5] == ("stream 1", "WAIT", "NONE", 4000, 4000, [2, 3])
    assert nodes[8] == ("stream 0", "WAIT", "NONE", 4100, 4100, [6]), "its own stream has been there"


def test_an_event_that_is_recorded_again_stands_for_its_newest_point():
    log = Log()
    log.row(stamp.RECORD, MAIN, 5, at=1000)
    log.row(stamp.RECORD, MAIN, 5, at=3000)
    log.row(stamp.WAIT, SIDE, 5, at=500)
    assert log.nodes()[-1][3:] == (3000, 3000, [5, 6])


def test_a_stream_is_nowhere_before_the_host_sent_it_there():
    log = Log()
    log.row(stamp.RECORD, MAIN, 5, at=90)  # clocks that differ by a little
    assert log.nodes()[1][4] == 100


def test_a_batch_is_one_launch_which_is_over_when_all_of_it_is():
    log = Log()
    log.operation(Op.RECV, at=1000, on=NCCL, end=5000, event=7, count=2)
    log.row(stamp.WAIT, MAIN, 7, at=3000)
    log.operation(Op.SEND, at=5500, on=NCCL, end=7000)
    nodes = log.nodes()
    assert nodes[2:5] == [
        ("nccl 0", "COMM", "RECV", 1000, 5000, [0, 1]),
        ("nccl 0", "COMM", "RECV", 1000, 5000, [0, 1]),
        ("nccl 0", "WAIT", "NONE", 5000, 5000, []),
    ]
    assert nodes[7] == ("stream 0", "WAIT", "NONE", 5000, 5000, [4, 5]), "its event is that of the batch"
    assert nodes[10][3:] == (5500, 7000, [8, 9])


def test_what_batches_wait_for_is_no_longer_than_they_are():
    log = Log()
    for k in range(3):
        log.operation(Op.SEND, at=1000 * k, on=NCCL, end=1000 * k + 900, count=500)
    made = log.made()
    source, target = predecessors(Program(made["columns"], made["edges"]), made["lanes"])
    joins = np.flatnonzero(made["columns"]["kind"] == Kind.WAIT)
    assert [np.sum(target == join) for join in joins] == [500] * 3, "the lane's order"
    assert [np.sum(source == join) for join in joins] == [500, 500, 0]
    assert len(source) < 2.1 * 2 * 3 * 500


def test_a_host_that_blocks_ends_when_the_stream_does():
    log = Log()
    log.row(stamp.SYNC_STREAM, MAIN, at=9000, takes=9500)
    log.now += 9500
    log.row(stamp.RECORD, MAIN, 5, at=9900)
    nodes = log.nodes()
    assert nodes[2] == ("host", "WAIT", "NONE", 9000, 9600, [1])
    assert nodes[4] == ("stream 0", "COMPUTE", "NONE", 9600, 9900, [2]), "launched after the host was back"


def test_a_backends_thread_that_blocks_while_the_host_does_is_not_the_host():
    log = Log()
    log.row(stamp.SYNC_STREAM, MAIN, at=9000, takes=9500)
    log.row(stamp.SYNC_STREAM, SIDE, at=4000, takes=5000)
    assert [node[:2] for node in log.nodes() if node[1] == "WAIT"] == [("host", "WAIT")]


def test_the_whole_device_is_its_streams_and_the_backends():
    log = Log()
    log.operation(at=1000, on=NCCL, end=8000)
    log.row(stamp.POINT, MAIN, at=3000)
    log.row(stamp.POINT, SIDE, at=4000)
    log.row(stamp.SYNC_DEVICE, takes=9000)
    nodes = log.nodes()
    assert nodes[-1][:4] == ("host", "WAIT", "NONE", 8000)
    assert [nodes[k][0] for k in nodes[-1][5]] == ["nccl 0", "stream 0", "stream 1"]


def test_a_step_is_a_point_of_its_stream():
    log = Log()
    log.step(at=7000)
    assert log.nodes()[-1] == ("stream 0", "MARK", "OPTIMIZER_STEP", 7000, 7000, [0])


def test_an_operation_that_never_returned_is_left_out():
    log = Log()
    log.operation(at=1000, on=NCCL, end=5000)
    log.rows.pop()
    assert [node[1] for node in log.nodes()] == ["COMPUTE", "COMPUTE"]


LANES = {
    "ddp": {"nccl 0"},  # buckets are asynchronous
    "fsdp": {"stream 0", "stream 3"},  # FSDP2 orders its own streams by events
    "tp": {"nccl 0"},  # functional collectives are asynchronous
    "1f1b": {"nccl 0"},  # batches
    "interleaved": {"nccl 0"},
    "moe": {"nccl 0", "stream 0"},
}
OPERATIONS = {"ddp": 2, "fsdp": 18, "tp": 19, "1f1b": 16, "interleaved": 48, "moe": 9}  # of rank 0 in an iteration


@pytest.fixture(scope="module", params=LANES)
def live(request):
    """(mode, graph) of a program on two H200s: torch 2.11.0, NCCL 2.28.9, host-bound because it is so small."""
    return request.param, live_graph(read_shards(GOLDEN / request.param), argparse.Namespace(warmup=3, iterations=2))


def test_a_real_log_makes_a_valid_graph(live):
    _, graph = live
    assert check(graph) == [] and find_matches(graph).problems == []
    assert graph.iterations() == 5 and graph.environment["device"] == "NVIDIA H200"


def test_operations_run_on_the_lanes_that_they_are_known_to_use(live):
    mode, graph = live
    for rank in (0, 1):
        program = graph.program_of(rank)
        talks = (program.kind == Kind.COMM) & (program.segment >= 1)
        assert {graph.lanes[lane] for lane in program.lane[talks]} == LANES[mode]
    program = graph.program_of(0)
    assert np.sum((program.kind == Kind.COMM) & (program.segment == 4)) == OPERATIONS[mode]


def test_iterations_have_the_same_nodes(live):
    _, graph = live
    for program in graph.programs:
        words = [
            np.stack([program.columns[c][program.segment == k] for c in ("kind", "op", "lane")]) for k in (2, 3, 4)
        ]
        assert all(np.array_equal(words[0], word) for word in words[1:])


def test_two_clocks_agree_on_the_end_of_a_collective(live):
    mode, graph = live
    matches = find_matches(graph)
    end = np.concatenate([graph.timing.end[0], graph.timing.end[1]])
    pairs = np.array([matches.members[m] for m in range(len(matches))])
    apart = np.abs(np.diff(end[pairs], axis=1))[len(pairs) // 2 :]
    assert np.median(apart) < 20_000, f"{mode}: ns"


def test_the_solve_gives_back_what_the_program_took_without_its_tracing(live):
    """These iterations are 11 to 57 ms long and bound by the host: tracing (8 µs an operation) is all that may miss."""
    _, graph = live
    solved, chosen = calibrate(graph).timeline, counted(graph)
    for rank in (0, 1):
        program, row = graph.program_of(rank), solved.row[rank]
        took = iteration_times(program, solved.start[row], solved.end[row], chosen)
        seen = graph.timing.iteration_ns[rank][chosen.start :]
        assert np.all(took <= 1.001 * seen) and np.all(took > 0.8 * seen)
