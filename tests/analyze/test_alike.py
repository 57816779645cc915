"""Reports on classes of ranks say what looking at every rank says."""

import random
from collections import Counter
from dataclasses import astuple, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prism_tools.analyze.group_table import groups
from prism_tools.analyze.lateness import lateness, straggler
from prism_tools.analyze.summary import summary
from prism_tools.analyze.tables import nodes, ranks
from prism_tools.analyze.waits import held_until, path_shares, slow_span
from prism_tools.calibrate.schedule import timeline
from prism_tools.graph.alike import timed_alike
from prism_tools.graph.classes import classes_of
from prism_tools.graph.match import find_matches
from prism_tools.graph.model import Memory, Ragged, Timeline
from prism_tools.graph.order import dependency_order
from tests.analyze import rank_by_rank
from tests.bench import clusters
from tests.calibrate.random_graphs import random_replicas
from tests.graph.builder import build, comm, compute, step, wait
from tests.graph.test_classes import copied_durations


def solve(graph, durations):
    matches = find_matches(graph, classes=classes_of(graph, durations.row))
    graph.durations = durations
    graph.timeline = timeline(graph, matches, dependency_order(graph, matches), durations)
    return graph


def check_reports(graph, **chosen):
    """All that reports work out; ``chosen`` narrows tables down. Returns how many classes they looked at."""
    few, every = timed_alike(graph), find_matches(graph, strict=False)
    start, held, end = rank_by_rank.times(graph, every)
    for rank in range(graph.world_size):
        at = np.arange(len(graph.program_of(rank)))
        assert held_until(graph, few)[few.flat(rank, at)].tolist() == held[every.flat(rank, at)].tolist()
    late = lateness(graph, few)
    found = straggler(graph, few, late)
    assert (found and astuple(found)) == rank_by_rank.straggler(graph)
    assert Counter(
        lag for seating, lag in zip(late.seating, late.lag.tolist(), strict=True)
        for _ in late.seatings[seating].groups
    ) == Counter(lag for _, lag in rank_by_rank.lateness(graph, every).values())  # fmt: skip
    assert path_shares(graph, few) == path_shares(graph, every)
    assert groups(graph, **chosen) == rank_by_rank.groups(graph, **chosen)
    slow = slow_span(graph)
    assert (slow and astuple(slow)) == rank_by_rank.slow_span(graph)
    rows = {(row["rank"], row["node"]): row for row in nodes(graph)}
    for (rank, node), row in rows.items():
        flat = every.flat(rank, node)
        assert (row["start_ns"], row["wait_ns"], row["end_ns"]) == (start[flat], (held - start)[flat], end[flat])
    for row in ranks(graph):
        mine = [other for (rank, _), other in rows.items() if rank == row["rank"]]
        assert row["nodes"] == len(mine) and row["bytes"] == sum(other["bytes"] or 0 for other in mine)
    return len(few.classes)


@given(st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_reports_of_random_replicas(seed):
    rng = random.Random(seed)
    graph, count = random_replicas(rng)
    solve(graph, copied_durations(rng, graph, np.arange(graph.world_size) % count))
    chosen = {}
    if rng.random() < 0.4:
        chosen["ranks"] = rng.sample(range(graph.world_size), rng.randint(1, graph.world_size))
    if rng.random() < 0.3:
        chosen["group"] = rng.choice(graph.groups.name)
    if rng.random() < 0.3:
        chosen["op"] = rng.choice(("send", "recv", "all_reduce"))
    if rng.random() < 0.3:
        chosen["iteration"] = 0
    check_reports(graph, **chosen)


@pytest.mark.parametrize("overlap", [False, True])
def test_reports_of_a_cluster_with_a_straggler(overlap):
    cluster = clusters.Cluster(tp=2, pp=3, dp=4, ep=2, iterations=3, overlap=overlap, microbatches=3)
    graph = clusters.build(cluster)
    row = graph.ranks.program * cluster.tp + np.arange(graph.world_size) % cluster.tp
    assert check_reports(solve(graph, clusters.durations(graph, row))) == cluster.pp * cluster.tp
    assert check_reports(solve(graph, clusters.durations(graph, row, slow=[5]))) < graph.world_size
    assert f"slowest member      rank {rank_by_rank.straggler(graph)[0]} is last in " in summary(graph)


def test_bytes_may_differ_within_a_class():
    graph = build(4, {"w": [0, 1, 2, 3]}, lambda rank: [compute(), comm("all_gather", "w", 100 + rank), step()])
    solve(graph, replace(copied_durations(random.Random(1), graph, np.zeros(4, int)), row=np.zeros(4, np.int32)))
    assert check_reports(graph) == 1
    assert [row["bytes"] for row in ranks(graph)] == [100, 101, 102, 103]
    assert groups(graph)[0]["bytes"] == 406


def test_one_rank_may_stand_for_all_members_of_a_match():
    """A ring of groups of two: every rank is in one as the first and in one as the second, and all are one class."""

    def nodes_of(rank):
        pair = [comm("all_reduce", f"g{(rank - k) % 5}", 4, name=f"c{k}", is_async=True) for k in (0, 1)]
        return [compute(), pair[0], compute(), pair[1], compute(), wait("c0", "c1"), step()] * 3

    graph = build(5, {f"g{k}": [k, (k + 1) % 5] for k in range(5)}, nodes_of)
    graph.ranks.program[:] = 0  # rank 0's: in all others the groups change places
    graph.ranks.slots = Ragged.from_rows([[rank, (rank - 1) % 5] for rank in range(5)], np.int32)
    solve(graph, copied_durations(random.Random(2), graph, np.zeros(5, int)))
    graph.durations.row[:] = 0
    assert check_reports(solve(graph, graph.durations)) == 1
    slow = replace(graph.durations, own=[*graph.durations.own, graph.durations.own[0] * 2])
    slow.row = np.array([0, 0, 1, 0, 0], np.int32)
    for name in ("tail", "spread", "source", "bias"):
        setattr(slow, name, getattr(slow, name) * 2)
    assert check_reports(solve(graph, slow)) > 1


def test_incomplete_matches_are_looked_at_rank_by_rank():
    def nodes_of(rank):
        return [compute(), comm("barrier", "ab"[rank // 4])] * (2 + (rank == 5)) + [step()]

    graph = build(8, {"a": [0, 1, 2, 3], "b": [4, 5, 6, 7]}, nodes_of)
    assert len(find_matches(graph, strict=False).problems) == 1
    start = [np.arange(len(program)) * (1 + k) for k, program in enumerate(graph.programs)]
    critical = np.array([[5, 0], [5, 1], [4, 1]])
    graph.durations = copied_durations(random.Random(1), graph, np.zeros(8, int))
    graph.timeline = Timeline(graph.ranks.program, start, [row + 1 for row in start], np.array([1]), 1, 0, critical)
    assert check_reports(graph) == 8


def test_memory_is_the_most_that_a_rank_ever_had():
    graph = solve(
        clusters.build(clusters.Cluster()), clusters.durations(clusters.build(clusters.Cluster()), np.zeros(8))
    )
    graph.memory = Memory(np.array([0, 3, 3]), np.array([5, 7, 6]), np.array([-1, 4, 9]), np.full(3, -1), ["slice"] * 3)
    rows = ranks(graph)
    assert [(row["rss_bytes"], row.get("cuda_bytes")) for row in rows[:4]] == [
        (5, None),
        (None, None),
        (None, None),
        (7, 9),
    ]
