"""A sandbox that does something else than was recorded: the first operation that differs, in one line."""

import re
from pathlib import Path

import pytest
import torch

from prism_tools.capture.calls import Call
from prism_tools.capture.server import Group, Operation
from prism_tools.capture.trace import Tracer
from prism_tools.emulate.divergence import check_operation, check_trace
from prism_tools.errors import PrismError
from prism_tools.graph.schema import Op, Reduce
from tests.graph.builder import build, comm, compute
from tests.tools import SUMS

MEMBERS = (0, 1)


def recorded(operations):
    """Two ranks that call all_reduce of each of the sizes (bytes), synchronously."""
    nodes = [node for size in operations for node in (compute(), comm("all_reduce", "world", size))]
    return build(2, {"world": list(MEMBERS)}, lambda rank: nodes)


def called(op, node, elements=4, members=MEMBERS):
    group = Group(0, "0", "default_pg", "gloo", members, {rank: rank for rank in members})
    descs = [("float32", elements)]
    return Operation(
        1, node, group, op, Reduce.SUM, -1, -1, -1, descs, True, "t.py:8 main", 0, True, 1.0, False, memoryview(b"")
    )


def test_the_recorded_operation_passes():
    check_operation(recorded([16, 64]), 1, called(Op.ALL_REDUCE, 3, 16))


@pytest.mark.parametrize(
    ("operation", "got"),
    [
        (called(Op.ALL_REDUCE, 3, 8), "all_reduce 32 B float32 on world [0,1]"),
        (called(Op.ALL_GATHER, 3, 16), "all_gather 64 B float32 on world [0,1]"),
        (called(Op.ALL_REDUCE, 3, 16, (1,)), "all_reduce 64 B float32 on world [1]"),
    ],
)
def test_another_operation_size_or_group(operation, got):
    expected = "expected all_reduce 64 B on world desc [0,1] (train.py:1 all_reduce)"
    with pytest.raises(PrismError) as caught:
        check_operation(recorded([16, 64]), 1, operation)
    assert str(caught.value) == f"rank 1 diverged at operation 1: {expected}, got {got} (t.py:8 main)"


def test_an_operation_after_the_last_one():
    with pytest.raises(PrismError, match="diverged at operation 2: expected the end of the recording, got barrier"):
        check_operation(recorded([16, 64]), 0, called(Op.BARRIER, 5))


def traced(sizes, op=Op.ALL_REDUCE):
    tracer = Tracer()
    for size in sizes:
        tensors = [torch.zeros(size // 4)]
        tracer.waited(tracer.comm(Call(op, tensors, tensors, Reduce.SUM), 0), 0, by_torch=True)
    return tracer.export(0, [MEMBERS])


def without_last(trace):
    return trace | {"columns": {name: column[:-1] for name, column in trace["columns"].items()}}


def test_a_finished_rank():
    graph = recorded([16, 64])
    check_trace(graph, 0, traced([16, 64]))
    with pytest.raises(PrismError, match=r"operation 1: expected all_reduce 64 B on .*, got the end of the program"):
        check_trace(graph, 0, without_last(traced([16, 64])))
    with pytest.raises(
        PrismError, match=r"operation 2: expected the end of the recording, got all_reduce \(.*test_div"
    ):
        check_trace(graph, 0, traced([16, 64, 16]))
    with pytest.raises(PrismError, match=r"operation 0: expected all_reduce 16 B on .*, got all_gather \(.*test_div"):
        check_trace(graph, 0, traced([16, 64], Op.ALL_GATHER))


def other(bench, old, new):
    """sums.py with one line changed."""
    text = Path(SUMS).read_text()
    assert old in text
    path = bench.out / "other.py"
    path.write_text(text.replace(old, new))
    return path


@pytest.mark.parametrize(
    ("old", "new", "pattern"),
    [
        (
            "torch.full((3,)",
            "torch.full((4,)",
            r"rank 0 diverged at operation 6: expected recv 12 B on world \[0,1,2,3\] \(sums\.py:\d+ <module>\), "
            r"got recv 16 B float32 on world \[0,1,2,3\] \(other\.py:\d+ <module>\)",
        ),
        (
            "range(3)",
            "range(2)",
            r"rank \d diverged at operation 4: expected all_reduce 16 B on world \[0,1,2,3\] \(sums\.py:\d+ <module>\), "
            r"got (recv 12 B float32 on world \[0,1,2,3\] \(other\.py:\d+ <module>\)|the end of the program)",
        ),
        (
            "if dist.get_rank() == 0",
            "if dist.get_rank() == 9",
            r"rank 0 diverged at operation 6: expected recv 12 B on world \[0,1,2,3\] \(sums\.py:\d+ <module>\), "
            r"got the end of the program",
        ),
    ],
)
def test_replay_of_another_program(old, new, pattern, bench, sums):
    path = other(bench, old, new)
    done = bench.run("replay", "-r", "0-1", sums["calibrated"], "-o", "x.h5", "--", path, expect=1)
    (line,) = done.stderr.splitlines()
    assert re.fullmatch("prism-replay: " + pattern, line), line
    assert bench.files() == {"other.py"}


def test_replay_of_a_program_that_crashes(bench, sums):
    path = other(bench, "model = ", "raise ValueError('no data')\nmodel = ")
    done = bench.run("replay", "-r", 0, sums["calibrated"], "-o", "x.h5", "--", path, expect=1)
    lines = done.stderr.splitlines()
    assert lines[0] == "Traceback (most recent call last):" and lines[-2] == "ValueError: no data"
    assert lines[-1].startswith("prism-replay: rank 0 ended with exit status 1")
    assert len([line for line in lines if line.startswith("prism-replay: ")]) == 1
