"""Classes of ranks: as few as symmetry allows, and solving one rank of each solves the graph exactly."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prism_tools.calibrate.schedule import timeline
from prism_tools.calibrate.solver import solve
from prism_tools.errors import PrismError
from prism_tools.graph.classes import classes_of, everybody
from prism_tools.graph.match import find_matches
from prism_tools.graph.model import Durations
from prism_tools.graph.order import dependency_order
from prism_tools.graph.schema import Kind
from tests.bench import clusters
from tests.calibrate.random_graphs import random_replicas
from tests.graph.builder import build, comm, compute, differences, step

CLUSTERS = {
    "1f1b": clusters.Cluster(tp=2, pp=4, dp=3),
    "overlap": clusters.Cluster(tp=2, pp=3, dp=4, ep=2, overlap=True),
    "interleaved": clusters.Cluster(tp=2, pp=3, dp=2, chunks=2, microbatches=6),
    "interleaved overlap": clusters.Cluster(tp=1, pp=3, dp=4, ep=4, chunks=2, microbatches=6, overlap=True),
}


def solved(graph, durations, classes):
    matches = find_matches(graph, classes=classes)
    order = dependency_order(graph, matches)
    return timeline(graph, matches, order, durations), *solve(graph, matches, order, durations)


def timeline_in_lanes(graph, durations):
    """The timeline with all ranks that do the same as lanes of one class."""
    matches = find_matches(graph, classes=classes_of(graph, np.zeros(graph.world_size)))
    return timeline(graph, matches, dependency_order(graph, matches), durations)


def check_path(graph, durations, found):
    """Along the critical path nothing but what its nodes take passes."""
    matches, clock = find_matches(graph), None
    path = found.critical.tolist()
    for here, after in zip(path, path[1:] + [None], strict=True):
        of_node = [matches.of_node[matches.base[rank] + node] for rank, node in filter(None, (here, after))]
        if len(of_node) == 2 and of_node[0] >= 0 and of_node[0] == of_node[1]:
            continue  # the last to arrive; the path goes on from the other member
        rank, node = here
        row, ends = durations.row[rank], found.end[found.row[rank]]
        took = durations.own[row][node] + durations.tail[row][node]
        assert clock is None or clock + took == ends[node]
        clock = ends[node]


def check_exact(graph, durations):
    """One rank of each class gives the times of all ranks; returns the number of classes."""
    classes = classes_of(graph, durations.row)
    whole, starts, ends = solved(graph, durations, everybody(graph))
    part, few_starts, few_ends = solved(graph, durations, classes)
    lanes = timeline_in_lanes(graph, durations)
    for rank, at in enumerate(classes.of_rank):
        assert starts[rank].tolist() == few_starts[at].tolist() and ends[rank].tolist() == few_ends[at].tolist()
    # Of equally late members the path may go through others.
    for other in (part, lanes):
        assert (
            differences(replace(whole, critical=None, interval_ns=0), replace(other, critical=None, interval_ns=0))
            == []
        )
        check_path(graph, durations, other)
    return len(classes)


@pytest.mark.parametrize("name", CLUSTERS)
def test_replicas_are_one_class_and_a_straggler_touches_its_own_groups(name):
    cluster = CLUSTERS[name]
    graph = clusters.build(cluster)
    row = graph.ranks.program * cluster.tp + np.arange(graph.world_size) % cluster.tp
    assert check_exact(graph, clusters.durations(graph, row)) == cluster.pp * cluster.tp
    apart = check_exact(graph, clusters.durations(graph, row, slow=[1]))
    assert cluster.pp * cluster.tp < apart <= 3 * cluster.pp * cluster.tp  # its replica, its experts' others, the rest
    assert check_exact(graph, clusters.durations(graph, np.arange(graph.world_size))) == graph.world_size


def copied_durations(rng, graph, alike):
    """Ranks of equal number in ``alike`` and of one program take as long, but for some; all communication takes 7."""
    most, known = rng.choice((3, 1000)), Durations(np.zeros(graph.world_size, np.int32), [], [], [], [], [])
    rows, slow = {}, rng.choice((0, 0.05, 0.3))
    for rank, number in enumerate(alike.tolist()):
        program = graph.program_of(rank)
        key = (graph.ranks.program[rank], number, rank if rng.random() < slow else -1)
        known.row[rank] = rows.setdefault(key, len(rows))
        if len(rows) > len(known.own):
            own = np.array([rng.randint(0, most) for _ in program.kind], np.int64)
            tail = np.where(program.kind == Kind.COMM, rng.randint(0, 2), 0)
            known.own.append(np.where(program.kind == Kind.COMM, 7, own))
            known.tail.append(tail)
            known.spread.append(tail)
            known.bias.append(tail)
            known.source.append(tail.astype(np.uint8))
    return known


@given(st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_one_rank_of_each_class_solves_the_graph(seed):
    rng = random.Random(seed)
    graph, count = random_replicas(rng)
    alike = np.arange(graph.world_size) % count
    check_exact(graph, copied_durations(rng, graph, alike))


def test_lanes_take_durations_other_than_those_that_made_the_classes():
    graph = clusters.build(clusters.Cluster(tp=2, pp=3, dp=4))
    before, after = np.arange(graph.world_size) % 2, np.arange(graph.world_size) % 3
    row = graph.ranks.program * 6 + after
    known = clusters.durations(graph, row)
    whole = solved(graph, known, everybody(graph))[0]
    classes = classes_of(graph, graph.ranks.program * 2 + before)
    matches = find_matches(graph, classes=classes)
    lanes = timeline(graph, matches, dependency_order(graph, matches), known)
    assert len(classes) < graph.world_size
    for rank in range(graph.world_size):
        assert lanes.end[lanes.row[rank]].tolist() == whole.end[whole.row[rank]].tolist()


def test_a_ring_of_one_class_is_a_rank_that_sends_to_itself():
    def nodes(rank):
        ring = [("send", (rank + 1) % 4), ("recv", (rank - 1) % 4)]
        return [compute(), *(comm(op, "w", 8, peer=peer, is_async=True, batch=0) for op, peer in ring), step()]

    graph = build(4, {"w": [0, 1, 2, 3]}, nodes)
    classes = classes_of(graph, np.zeros(4, int))
    matches = find_matches(graph, classes=classes)
    assert len(classes) == 1 and [row.tolist() for row in matches.members] == [[1, 2]]
    assert len(classes_of(graph, np.array([0, 0, 1, 0]))) == 4  # each at its own distance from the odd one


def test_a_circle_is_one_rank_that_waits_for_itself():
    def nodes(rank):
        return [comm("send", "w", 8, peer=(rank + 1) % 4), comm("recv", "w", 8, peer=(rank - 1) % 4)]

    graph = build(4, {"w": [0, 1, 2, 3]}, nodes)
    matches = find_matches(graph, classes=classes_of(graph, np.zeros(4, int)))
    with pytest.raises(PrismError, match="wait for each other: rank 0 send on w .* waits for rank 0; "):
        dependency_order(graph, matches)


def test_the_root_of_a_group_is_apart_and_a_tree_has_only_places():
    def nodes(op):
        return lambda rank: [compute(), comm(op, "w", 8, root=1)]

    row = np.zeros(6, int)
    for op, backend, count in (
        ("reduce", "nccl", 2),
        ("broadcast", "nccl", 2),
        ("gather", "gloo", 2),
        ("broadcast", "gloo", 6),
    ):
        graph = build(6, {"w": list(range(6))}, nodes(op), backend)
        assert len(classes_of(graph, row)) == count


def test_a_missing_member_is_named_although_its_class_has_others():
    graph = build(
        4, {"a": [0, 1], "b": [2, 3]}, lambda rank: [comm("barrier", "a" if rank < 2 else "b")] * (1 + rank % 2)
    )
    classes = classes_of(graph, np.zeros(4, int))
    assert len(classes) == 2
    with pytest.raises(PrismError, match="rank 1 barrier on a, node 1 .*: no counterpart on ranks 0; "):
        find_matches(graph, classes=classes)
