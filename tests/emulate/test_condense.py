"""The condensed graph gives the full graph's times exactly, whatever sandbox ranks do."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prism_tools.calibrate.solver import solve
from prism_tools.emulate.condense import Vertex, condense
from prism_tools.graph.match import find_matches
from prism_tools.graph.order import dependency_order
from prism_tools.graph.schema import Kind
from tests.calibrate.random_graphs import make_eager, random_durations, random_graph
from tests.graph.builder import build, comm, compute, step


def prepared(graph, seed=0):
    matches = find_matches(graph)
    return matches, dependency_order(graph, matches), random_durations(random.Random(seed), graph, matches)


def check_exact(graph, matches, order, durations, condensed, sandbox):
    """Evaluate ``condensed`` with the arrivals of a full solve and compare every output."""
    start, end = solve(graph, matches, order, durations)
    arrivals = {(rank, node): int(start[rank][node]) for rank in sandbox for node in range(len(start[rank]))}
    ends = []
    for vertex in condensed.vertices:
        assert all(pred < len(ends) for pred, _ in vertex.preds)
        ends.append(vertex.end(ends, arrivals))
    for (rank, node), (vertex, tail) in condensed.output.items():
        assert ends[vertex] + tail == end[rank][node], (rank, node)


def facing(graph, matches, sandbox):
    """The sandbox's nodes in matches of groups that have a virtual member too."""
    found = set()
    for match in range(len(matches)):
        ranks = {matches.rank_of(member) for member in matches.members[match]}
        if ranks & sandbox and set(graph.groups.members[matches.group[match]].tolist()) - sandbox:
            places = [(matches.rank_of(member), matches.node_of(member)) for member in matches.members[match]]
            found |= {place for place in places if place[0] in sandbox}
    return found


def test_virtual_ranks_are_a_constant_until_the_sandbox_touches_them():
    def nodes(rank):
        return [compute(), comm("all_reduce", "world", 4), compute(), comm("barrier", "world"), compute(), step()]

    graph = build(3, {"world": [0, 1, 2]}, nodes)
    matches, order, durations = prepared(graph)
    for rank, spans in enumerate(([10, 5, 20, 3, 0, 0], [11, 5, 30, 3, 0, 0], [12, 5, 25, 3, 0, 0])):
        durations.own[rank][:], durations.tail[rank][:] = spans, 0
    durations.tail[0][1], durations.tail[2][1] = 2, 9
    condensed = condense(graph, matches, order, durations, {0})
    assert condensed.vertices == [
        Vertex(preds=[], live=[(0, 1)], constant=12, delay=5),
        Vertex(preds=[(0, 34)], live=[(0, 3)], constant=None, delay=3),
    ]
    assert condensed.output == {(0, 1): (0, 2), (0, 3): (1, 0)}
    assert condensed.vertices[1].end([100], {(0, 3): 90}) == 137


def test_matches_inside_the_sandbox_or_outside_it_are_no_vertices():
    graph = build(4, {"a": [0, 1], "b": [2, 3]}, lambda rank: [compute(), comm("barrier", "ab"[rank // 2]), compute()])
    condensed = condense(graph, *prepared(graph), {0, 1})
    assert condensed.vertices == [] and condensed.output == {}


def test_early_leavers_do_not_wait_for_virtual_members():
    graph = build(
        3, {"world": [0, 1, 2]}, lambda rank: [compute(), comm("reduce", "world", 4, root=2), compute()], "nccl"
    )
    matches, order, durations = prepared(graph)
    condensed = condense(graph, matches, order, durations, {0, 1})
    assert [(vertex.preds, vertex.live, vertex.constant) for vertex in condensed.vertices] == [
        ([], [(0, 1)], None),
        ([], [(1, 1)], None),
    ]


def test_long_lists_become_auxiliary_vertices():
    """Rank 0 meets each virtual rank alone; then they meet all together, twice, and rank 0 at last."""
    ranks = 8
    pairs = {f"p{rank}": [0, rank] for rank in range(1, ranks)}
    groups = {**pairs, "virtual": list(range(1, ranks)), "world": list(range(ranks))}

    def nodes(rank):
        meet = [rank] if rank else list(range(1, ranks))
        alone = [node for other in meet for node in (compute(), comm("barrier", f"p{other}"))]
        together = [compute(), comm("barrier", "virtual"), compute(), comm("barrier", "virtual")] if rank else []
        return [*alone, *together, compute(), comm("barrier", "world"), compute()]

    graph = build(ranks, groups, nodes)
    matches, order, durations = prepared(graph)
    with_auxiliary = condense(graph, matches, order, durations, {0}, cap=4)
    auxiliary = [vertex for vertex in with_auxiliary.vertices if not vertex.live]
    assert [len(vertex.preds) for vertex in auxiliary] == [7]
    assert len(with_auxiliary.vertices[-1].preds) == 1
    without = condense(graph, matches, order, durations, {0}, cap=100)
    assert all(vertex.live for vertex in without.vertices) and len(without.vertices[-1].preds) == 7
    for condensed in (with_auxiliary, without):
        check_exact(graph, matches, order, durations, condensed, {0})


@pytest.mark.parametrize("cap", [1, 4])
@given(st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_equals_the_full_solve_whatever_the_sandbox_does(cap, seed):
    rng = random.Random(seed)
    graph = random_graph(rng)
    matches = find_matches(graph)
    make_eager(rng, matches)
    order, durations = dependency_order(graph, matches), random_durations(rng, graph, matches)
    sandbox = set(rng.sample(range(graph.world_size), rng.randint(1, graph.world_size)))
    condensed = condense(graph, matches, order, durations, sandbox, cap)
    assert set(condensed.output) == facing(graph, matches, sandbox)
    assert {node for vertex in condensed.vertices for node in vertex.live} <= facing(graph, matches, sandbox)
    for _ in range(3):
        check_exact(graph, matches, order, durations, condensed, sandbox)
        for rank in sandbox:
            kinds = graph.program_of(rank).kind
            for node in range(len(kinds)):
                if kinds[node] != Kind.COMM and rng.random() < 0.7:
                    durations.own[rank][node] = rng.choice((0, rng.randint(0, 5000)))
