"""Invariants: each one is broken here once, and named."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prism_tools.calibrate.schedule import timeline
from prism_tools.graph import check as checks
from prism_tools.graph.check import CHECKS, check
from prism_tools.graph.check_matches import checked_matches
from prism_tools.graph.classes import classes_of
from prism_tools.graph.match import find_matches
from prism_tools.graph.model import Ragged
from prism_tools.graph.order import dependency_order
from prism_tools.graph.schema import Kind, Op, Reduce
from tests.calibrate.random_graphs import random_replicas
from tests.graph.builder import add_results, add_timing, build, comm, compute, step, train4
from tests.graph.test_classes import copied_durations


def full():
    graph = train4()
    add_results(graph)
    return graph


def test_good_graphs_have_no_problems():
    assert check(full()) == check(train4()) == check(build(1, {}, lambda rank: [])) == []


def test_every_invariant_is_a_documented_function():
    assert len({function.__name__ for function in CHECKS}) == len(CHECKS) == 14
    assert all(function.__doc__ for function in CHECKS)


def edges(graph):
    graph.programs[0].edges = graph.programs[0].edges[:, ::-1]


def slot(graph):
    graph.programs[0].slot[4] = 3


def member(graph):
    graph.groups.members[1][:] = [1, 2]


def twice(graph):
    graph.groups.members[1][:] = [0, 0]


def root(graph):
    graph.programs[0].root[1] = 4


def kind(graph):
    graph.programs[0].kind[0] = Kind.MARK


def lane(graph):
    graph.lanes[0] = "gloo"


def values(graph):
    graph.values[1].splits = Ragged.from_rows([[1]], np.int64)


def timing(graph):
    graph.timing.start[2] = graph.timing.start[2][:-1]


def segment(graph):
    graph.programs[0].segment[5] = 1


def gap(graph):
    segments = graph.programs[0].segment
    segments[segments == 1] = 2


def negative(graph):
    graph.durations.tail[3][7] = -1


def backwards(graph):
    graph.timing.end[1][5] = graph.timing.start[1][5] - 1


def overtaken(graph):
    graph.timing.start[1][5] = graph.timing.start[1][4] - 1


def early(graph):
    graph.timeline.start[2] = graph.timeline.start[2] - np.eye(1, len(graph.timeline.start[2]), 11, dtype=np.int64)[0]


def hasty(graph):
    graph.timeline.start[2] = graph.timeline.start[2] + 5000
    graph.timeline.end[2] = graph.timeline.end[2] + 5000


def shorter(graph):
    graph.values[0].columns["count"][4] = 1


def splits(graph):
    graph.values[0].splits.data[1] = 65


@pytest.mark.parametrize(
    ("damage", "line"),
    [
        (edges, "edges_forward: program 0: edge 8-7 does not lead forward (11 more like it)"),
        (slot, "groups_legal: rank 0: communication in group slot 3; it has 3 groups (3 more like it)"),
        (member, "groups_legal: rank 0: communication in group tp0; it is no member"),
        (twice, "groups_legal: group tp0: its members are not ranks, each once"),
        (root, "groups_legal: rank 0: peer or root outside group world (3 more like it)"),
        (kind, "columns_legal: program 0: node 0 has a kind and an operation that do not belong together"),
        (lane, "columns_legal: lanes: the first one is not the host's"),
        (values, "offsets_in_range: values 1: its columns are not equally long, or its splits do not fit"),
        (timing, "rows_in_range: timing: row 2 does not have one entry for each node of rank 2"),
        (segment, "segments_monotone: program 0: node 6 steps back to segment 0"),
        (gap, "segments_monotone: program 0: no node is in iteration 1"),
        (negative, "durations_sane: row 3: tail of node 7 is negative"),
        (backwards, "times_monotone: timing row 1: rank 1 compute (node 5) ends before it starts, or starts before 0"),
        (overtaken, "times_monotone: timing row 1: rank 1 compute (node 5) is earlier than the host's node before it"),
        (early, "timeline_respects_edges: rank 2 compute (node 11) starts before rank 2 wait (train.py:2 wait) ended"),
        (shorter, "matches_consistent: rank 0 all_reduce on tp0 (train.py:5 forward) and rank 1 all_reduce on tp0 "
                  "(train.py:5 forward) differ in count: 1 and 1024"),
        (splits, "matches_consistent: rank 0 all_to_all on tp0 (train.py:1 all_to_all) sends 65 B to rank 1, "
                 "which expects 64 B"),
        (hasty, "timeline_respects_matches: rank 0 barrier on world (train.py:11 main) ends before all it waits for "
                "have arrived"),
    ],
)  # fmt: skip
def test_broken_invariant_is_named(damage, line):
    graph = full()
    damage(graph)
    assert line in check(graph)


@pytest.mark.parametrize(
    ("name", "pair", "line"),
    [
        ("dtype", ("float32", "int32"), "float32 and int32"),
        ("reduce", (Reduce.SUM, Reduce.MAX), "sum and max"),
        ("root", (0, 1), "0 and 1"),
    ],
)
def test_members_that_differ_are_named(name, pair, line):
    graph = build(
        2, {"w": [0, 1]}, lambda rank: [comm("reduce", "w", 4, **{"root": 0, name: pair[rank], "at": "a.py:1 f"})]
    )
    text = f"rank 0 reduce on w (a.py:1 f) and rank 1 reduce on w (a.py:1 f) differ in {name}: {line}"
    assert check(graph) == [f"matches_consistent: {text}"]


def test_counts_may_differ_where_the_operation_allows_it():
    ops = ("broadcast", "scatter", "all_gather", "all_to_all")
    assert check(build(2, {"w": [0, 1]}, lambda rank: [comm(op, "w", 4 * rank, root=0) for op in ops])) == []


def test_incomplete_matches_and_cycles_are_reported():
    graph = build(2, {"w": [0, 1]}, lambda rank: [comm("barrier", "w", at="a.py:1 f")] * rank)
    assert check(graph) == ["matches_complete: rank 1 barrier on w, node 0 (a.py:1 f): no counterpart on ranks 0"]
    groups = {"w": [0, 1], "v": [0, 1]}
    graph = build(2, groups, lambda rank: [comm("barrier", "wv"[rank]), comm("barrier", "vw"[rank])])
    assert check(graph)[0].startswith("acyclic: operations wait for each other: rank 0 barrier on w ")


def test_unequal_iterations_name_the_ranks():
    graph = build(3, {"w": [0]}, lambda rank: [compute(), step()] * (2 + rank // 2))
    assert check(graph) == ["iterations_equal: ranks 0-1 ran 2; ranks 2 ran 3"]


def test_unknown_times_are_no_problem():
    graph = build(1, {}, lambda rank: [compute(), step()])
    add_timing(graph, {0: [(-1, -1, -1, -1), (5, 5, 5, 6)]})
    assert check(graph) == []


def test_root_and_leaves_may_leave_early_in_a_timeline():
    graph = build(
        2,
        {"w": [0, 1]},
        lambda rank: [comm("broadcast", "w", 4, root=0), comm("reduce", "w", 4, root=0)],
        backend="nccl",
    )
    add_results(graph)
    graph.timeline.start[:] = [np.array([0, 20]), np.array([50, 60])]
    graph.timeline.end[:] = [np.array([10, 70]), np.array([55, 65])]
    assert check(graph) == []
    graph.timeline.end[0][1] = 59  # the root of a reduction needs everybody
    line = "timeline_respects_matches: rank 0 reduce on w (train.py:1 reduce) ends before all it waits for have arrived"
    assert check(graph) == [line]


def test_long_lists_are_cut():
    graph = build(2, {"w": [0, 1]}, lambda rank: [comm("barrier", "w")] * (50 * rank))
    found = [line for line in check(graph) if line.startswith("matches_complete")]
    assert len(found) == checks.SHOWN + 1 and found[-1] == "matches_complete: 30 more"


def test_ops_are_those_of_the_schema():
    assert Op.OPTIMIZER_STEP == max(Op) and int(max(Kind)) == 3


def test_operations_of_a_batch_run_beside_each_other():
    def nodes(rank):
        ring = [("send", (rank + 1) % 3), ("recv", (rank - 1) % 3)]
        return [compute(), *(comm(op, "w", 4, peer=peer, is_async=True, batch=0) for op, peer in ring), step()]

    graph = build(3, {"w": [0, 1, 2]}, nodes, "nccl")
    graph.durations = copied_durations(random.Random(0), graph, np.zeros(3, int))
    matches = find_matches(graph)
    graph.timeline = timeline(graph, matches, dependency_order(graph, matches), graph.durations)
    assert check(graph) == []
    graph.timeline.start[0][2] -= 1
    assert check(graph)[0].startswith("timeline_respects_edges: rank 0 recv on w ")


def damaged(rng, graph):
    """``graph`` with one thing of one rank changed: a column of its program or values, or its solved times."""
    rank = rng.randrange(graph.world_size)
    node = rng.randrange(len(graph.program_of(rank)))
    name = rng.choice(("dtype", "reduce", "count", "splits", "start", "end"))
    if name in ("dtype", "reduce"):
        columns = dict(graph.program_of(rank).columns)
        columns[name] = columns[name].copy()
        columns[name][node] += 1
        graph.programs.append(replace(graph.program_of(rank), columns=columns))
        graph.ranks.program[rank] = len(graph.programs) - 1
    elif name in ("count", "splits"):
        values = graph.values_of(rank)
        columns = dict(values.columns) | {"count": values.count.copy()}
        columns["count"][node] += name == "count"
        splits = [values.splits[k].copy() for k in range(len(values.count))]
        splits[node][rng.randrange(len(splits[node])) :][:1] += name == "splits"
        graph.values.append(replace(values, columns=columns, splits=Ragged.from_rows(splits, np.int64)))
        graph.ranks.values[rank] = len(graph.values) - 1
    else:
        for column in ("start", "end"):
            row = getattr(graph.timeline, column)[graph.timeline.row[rank]].copy()
            row[node] += (column == name) * rng.choice((-2, 2, 10_000))
            getattr(graph.timeline, column).append(row)
        graph.timeline.row[rank] = len(graph.timeline.start) - 1


@given(st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_what_is_wrong_is_the_same_among_classes_and_rank_by_rank(seed):
    rng = random.Random(seed)
    graph, count = random_replicas(rng)
    for rank in range(graph.world_size):
        program, slots = graph.program_of(rank), graph.ranks.slots[rank]
        program.op[program.op == Op.ALL_GATHER] = Op.ALL_TO_ALL
        sizes = [len(graph.groups.members[slots[slot]]) for slot in program.slot]  # of nodes that have none, some
        graph.values_of(rank).splits = Ragged.from_rows([[4] * 2 * size for size in sizes], np.int64)
    durations = copied_durations(rng, graph, np.arange(graph.world_size) % count)
    matches = find_matches(graph, classes=classes_of(graph, durations.row))
    graph.timeline = timeline(graph, matches, dependency_order(graph, matches), durations)
    assert [line for line in check(graph) if not line.startswith("iterations_equal")] == []
    damaged(rng, graph)
    every, timed = np.arange(graph.world_size, dtype=np.int32), graph.timeline
    rows = {name: [getattr(timed, name)[row] for row in timed.row] for name in ("start", "end")}
    found = check(graph)
    graph.timeline = replace(timed, row=every, **rows)
    assert len(checked_matches(graph).classes) == graph.world_size
    assert check(graph) == found
