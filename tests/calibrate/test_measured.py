"""One rank of each class gets the durations that each rank of the class would get by itself."""

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from prism_tools.calibrate.durations import durations
from prism_tools.calibrate.measured import alike, read_rows
from prism_tools.calibrate.solver import solve
from prism_tools.graph.classes import classes_of
from prism_tools.graph.match import find_matches
from prism_tools.graph.model import Probes
from prism_tools.graph.order import dependency_order
from prism_tools.graph.schema import Op
from tests.bench import clusters
from tests.calibrate.random_graphs import COLLECTIVES, random_durations, random_replicas
from tests.graph.builder import add_timing

FIELDS = ("own", "tail", "spread", "bias", "source")


def check_equal(graph):
    """Number of classes that gave the durations of all."""
    measured = read_rows(graph)
    classes = classes_of(graph, alike(graph, measured))
    few = durations(graph, find_matches(graph, classes=classes), measured)
    every = durations(graph, find_matches(graph))
    for rank in range(graph.world_size):
        for name in FIELDS:
            mine, wanted = (getattr(known, name)[known.row[rank]].tolist() for known in (few, every))
            assert mine == wanted, (rank, name)
    return len(classes)


def random_probes(rng, sizes):
    """Some collectives among so many, and sends, of 64 bytes; of large groups a few processes stand for all."""
    rows = [(int(Op[op.upper()]), size) for op in COLLECTIVES for size in sizes if rng.random() < 0.6]
    rows += [(int(Op.SEND), 2)] * (rng.random() < 0.6)
    tails, issue = ([np.resize([rng.randint(0, 9) for _ in range(min(n, 2))], n) for _, n in rows] for _ in range(2))
    count = np.ones(len(rows), np.int64)
    op, size = np.array(rows, np.int64).reshape(-1, 2).T
    return Probes(op, count * 0, count * 0, size, count * 64, count * 7, count * 3, count, tails, issue)


@given(st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_classes_get_the_durations_of_all(seed):
    rng = random.Random(seed)
    graph, _ = random_replicas(rng)
    matches = find_matches(graph)
    start, end = solve(graph, matches, dependency_order(graph, matches), random_durations(rng, graph, matches, 20))
    of_program = {program: rank for rank, program in enumerate(graph.ranks.program.tolist())}
    chosen = {rank for rank in range(graph.world_size) if rng.random() < 0.4} | set(of_program.values())
    for number in range(rng.randint(1, 3)):  # slices
        some = [rank for rank in sorted(chosen) if number == 0 or rng.random() < 0.5]
        if some:
            add_timing(graph, {r: [(a, a, a, b) for a, b in zip(start[r], end[r], strict=True)] for r in some}, number)
    graph.probes = random_probes(rng, {len(members) for members in graph.groups.members})
    check_equal(graph)


def test_a_cluster_of_which_one_replica_was_measured():
    """4 of 128 ranks. Probes of 32 replicas are by 8 processes, whose tails tell 8 kinds of places apart: 4 * 8 classes, and
    those who share their experts with a measured rank are 4 * 3 more."""
    graph = clusters.sliced(clusters.Cluster(tp=2, pp=2, dp=32, ep=4))
    assert graph.world_size == 128
    assert check_equal(graph) == 4 + 4 * 8 + 4 * 3
