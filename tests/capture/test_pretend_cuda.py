"""A program for GPUs on CPUs: it computes what it computes with gloo on CPUs, at each stage, and its graph is of NCCL's."""

import pytest

from prism_tools.graph import file
from prism_tools.graph.check import check
from prism_tools.graph.schema import PRETEND_CUDA, UNKNOWN, Kind, Op
from tests.tools import said

OPTIONS = ("--pretend-cuda", "--reduce-order", "ring")


@pytest.fixture(scope="module")
def bare(stages):
    return stages.recorded("cuda_job.py", world=4, options=OPTIONS)


@pytest.fixture(scope="module")
def expected(real):
    return said(real.output("cuda_job.py", "cpu", world=4), "loss")


def test_it_computes_what_it_computes_on_cpus(bare, expected):
    assert len(expected) == 4 * 8
    assert bare.lines("loss") == expected


def test_the_graph_is_of_nccl(bare):
    graph = file.read(bare.path)
    assert check(graph) == []
    assert graph.launch.device == PRETEND_CUDA
    assert set(graph.groups.backend) == {"nccl"}
    assert sorted(members.tolist() for members in list(graph.groups.members)[:3]) == [[0, 1], [0, 1, 2, 3], [2, 3]]
    program = graph.program_of(0)
    assert ((program.op == Op.SEND) & (program.kind == Kind.COMM)).sum() == 2
    assert graph.values_of(0).tag[program.op == Op.SEND].tolist() == [0, 0]


def test_a_slice_and_a_replay_pretend_too(bare, expected, stages):
    """Ranks 0 and 1 are a group of gloo's under NCCL's name; their tags differ, as NCCL allows."""
    sliced = stages.sliced(bare, "--no-probe", "-v")
    assert sliced.lines("loss") == expected
    memory = file.read(sliced.path).memory
    assert memory is not None and (memory.allocated == UNKNOWN).all()
    replayed = stages.replayed(stages.calibrated(sliced), "1-2")
    assert replayed.lines("loss") == [line for line in expected if line.split()[2] in ("1", "2")]
