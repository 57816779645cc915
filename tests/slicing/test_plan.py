"""Plans: nodes and tensor-parallel groups stay whole, every rank is in one slice, or every program class in one."""

import numpy as np
import pytest

from prism_tools.graph import file
from prism_tools.slicing.plan import partial_nodes, slices
from tests.graph.builder import build, comm, compute
from tests.tools import run


def job(world, nproc, tp, strided=False, stages=1):
    """Tensor-parallel groups of ``tp`` neighbours (``strided``: as far apart as can be), which sum twice for once that the
    data-parallel ones do; ranks of each of the ``stages`` do as many computations as its number."""
    count = world // tp
    names = [f"tp{k}" for k in range(count)], [f"dp{k}" for k in range(tp)]
    near, far = (
        [list(range(k * tp, (k + 1) * tp)) for k in range(count)],
        [list(range(k, world, tp)) for k in range(tp)],
    )
    if strided:
        near = [list(range(k, world, count)) for k in range(count)]
        far = [list(range(k * count, (k + 1) * count)) for k in range(tp)]
    groups = dict(zip(names[0] + names[1], near + far, strict=True))

    def nodes(rank):
        mine = {name[:2]: name for name, members in groups.items() if rank in members}
        work = [compute()] * (1 + rank * stages // world)
        return [
            *work,
            comm("all_reduce", mine["tp"], 8),
            comm("all_reduce", mine["tp"], 8),
            comm("all_reduce", mine["dp"], 8),
        ]

    graph = build(world, {"world": list(range(world))} | groups, nodes)
    graph.ranks.node = np.arange(world, dtype=np.int32) // nproc
    return graph


def runs(first, size, count):
    """``count`` slices of ``size`` neighbours from ``first`` on."""
    return [list(range(first + k * size, first + (k + 1) * size)) for k in range(count)]


@pytest.mark.parametrize(
    "world, nproc, tp, size, expected, partial",
    [
        (8, 4, 2, 2, runs(0, 2, 4), {0: 2, 1: 2}),
        (8, 4, 2, 6, runs(0, 4, 2), {}),  # two more of the next node would be but a part of it
        (8, 8, 2, 4, runs(0, 4, 2), {}),  # one node: no more is known of it
        (16, 8, 4, 6, runs(0, 4, 4), {0: 4, 1: 4}),  # one group and a half have room
        (16, 4, 4, 12, [list(range(12)), [12, 13, 14, 15]], {}),
        (12, 6, 3, 4, runs(0, 3, 4), {0: 3, 1: 3}),
        (64, 8, 8, 8, runs(0, 8, 8), {}),
        (64, 8, 4, 4, runs(0, 4, 16), dict.fromkeys(range(8), 4)),
        (64, 4, 8, 8, runs(0, 8, 8), {}),  # groups across nodes
    ],
)
def test_neighbours(world, nproc, tp, size, expected, partial):
    graph = job(world, nproc, tp)
    planned = slices(graph, size)
    assert planned == expected and slices(job(world, nproc, tp), size) == planned
    assert partial_nodes(graph, planned) == partial


def test_groups_of_ranks_far_apart():
    assert slices(job(8, 8, 2, strided=True), 2) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert slices(job(8, 8, 2, strided=True), 4) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert slices(job(16, 4, 4, strided=True), 8) == runs(0, 8, 2), "nodes come first"


def test_a_rank_without_room_beside_its_node_is_alone():
    graph = build(6, {"world": list(range(6))}, lambda rank: [compute()])
    graph.ranks.node = np.array([0, 0, 0, 1, 1, 1], np.int32)
    assert slices(graph, 2) == [[0, 1], [2], [3, 4], [5]]
    graph.ranks.node = np.array([0, 0, 0, 0, 1, 1], np.int32)
    assert slices(graph, 5) == [[0, 1, 2, 3], [4, 5]]


@pytest.mark.parametrize(
    "world, nproc, tp, stages, size, expected",
    [
        (64, 8, 8, 1, 8, [list(range(8))]),
        (64, 8, 8, 4, 8, [list(range(k, k + 8)) for k in (0, 16, 32, 48)]),
        (16, 8, 2, 8, 4, runs(0, 4, 4)),
        (16, 8, 2, 2, 2, [[0, 1], [8, 9]]),
    ],
)
def test_one_slice_of_each_class(world, nproc, tp, stages, size, expected):
    assert slices(job(world, nproc, tp, stages=stages), size, "classes") == expected


def test_plan_says_what_it_splits(tmp_path):
    file.write(job(16, 8, 2, stages=2), tmp_path / "bare.h5")
    done = run("slice", "plan", "bare.h5", "-s", 4, "--cover", "classes", cwd=tmp_path)
    assert [line.split("\t")[:3] for line in done.stdout.splitlines()[1:]] == [["0", "0-3", "0"], ["1", "8-11", "1"]]
    told = "4 of 8 ranks of a node run together on 2 nodes: what they cost each other there is not seen"
    assert done.stderr == f"prism-slice: warning: {told}; slices of 8 (-s 8) hold whole nodes\n"
    argv = ["run", "bare.h5", "-s", 4, "--cover", "classes", "--ranks", "8,14", "-o", "x.h5"]
    told = "bare.h5: no slice of one per class holds ranks 14; leave --cover classes out"
    assert run("slice", *argv, cwd=tmp_path, expect=1, PYTHONHASHSEED="7").stderr == f"prism-slice: {told}\n"
