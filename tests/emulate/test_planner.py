"""When emulated operations end: at once, or as the calibrated graph says; on graphs small enough to do by hand."""

import random

import pytest

from prism_tools.calibrate.solver import solve
from prism_tools.emulate.condense import Condensed, Vertex, condense
from prism_tools.emulate.planner import AtOnce, Timed
from prism_tools.graph.match import find_matches
from prism_tools.graph.order import dependency_order
from tests.calibrate.random_graphs import random_durations, random_graph
from tests.graph.builder import build, comm, compute

WORLD = {"world": [0, 1, 2, 3]}


def at_once(operation, sandbox, groups=WORLD, backend="gloo", **delays):
    """AtOnce for four ranks whose second node (number 1) is ``operation`` of their rank."""
    graph = build(4, groups, lambda rank: [compute(), operation(rank), compute()], backend)
    return AtOnce(graph, find_matches(graph), sandbox, **delays)


def test_a_collective_ends_when_the_last_sandbox_member_arrives():
    planner = at_once(lambda rank: comm("all_reduce", "world", 4), {0, 1})
    assert planner.start(5) == []
    assert planner.arrived(1, 1, 150) == []
    assert sorted(planner.arrived(0, 1, 100)) == [(0, 1, 150), (1, 1, 150)]


def test_absent_peers_have_always_arrived():
    planner = at_once(lambda rank: comm("all_reduce", "world", 4), {2})
    assert planner.arrived(2, 1, 100) == [(2, 1, 100)]


def broadcast(rank):
    return comm("broadcast", "world", 4, root=1)


def test_gloo_s_broadcast_lets_a_member_go_once_its_part_of_the_tree_is_there():
    """Root 1 sends to 2 and 3, and 2 to 0: the root does not wait for 0, which nobody needs."""
    planner = at_once(broadcast, {0, 1, 2})
    assert planner.arrived(0, 1, 100) == []
    assert planner.arrived(1, 1, 200) == []
    assert sorted(planner.arrived(2, 1, 300)) == [(0, 1, 300), (1, 1, 300), (2, 1, 300)]
    planner = at_once(broadcast, {0, 1})
    assert planner.arrived(1, 1, 200) == [(1, 1, 200)]
    assert planner.arrived(0, 1, 300) == [(0, 1, 300)]


def test_nccl_s_broadcast_lets_the_root_go_at_once():
    planner = at_once(broadcast, {0, 1, 2}, backend="nccl")
    assert planner.arrived(0, 1, 100) == []
    assert sorted(planner.arrived(1, 1, 200)) == [(0, 1, 200), (1, 1, 200)]
    assert planner.arrived(2, 1, 300) == [(2, 1, 300)]


def test_gather_s_root_waits_for_all_its_leaves_for_the_root():
    planner = at_once(lambda rank: comm("gather", "world", 4, root=0), {0, 1, 2})
    assert planner.arrived(1, 1, 100) == []
    assert planner.arrived(0, 1, 200) == [(1, 1, 200)]
    assert sorted(planner.arrived(2, 1, 300)) == [(0, 1, 300), (2, 1, 300)]


def pair(rank):
    return comm("send", "world", 4, peer=1) if rank == 0 else comm("recv", "world", 4, peer=0)


def test_send_and_receive_meet():
    graph = build(2, {"world": [0, 1]}, lambda rank: [compute(), pair(rank), compute()])
    planner = AtOnce(graph, find_matches(graph), {0, 1})
    assert planner.arrived(0, 1, 100) == []
    assert sorted(planner.arrived(1, 1, 170)) == [(0, 1, 170), (1, 1, 170)]


def test_a_delay_is_drawn_once_for_all_members_from_the_seed():
    def ends(seed):
        planner = at_once(lambda rank: comm("all_reduce", "world", 4), {0, 1}, delay_ns=1000, seed=seed)
        planner.arrived(0, 1, 100)
        return planner.arrived(1, 1, 150)

    found = [ends(seed) for seed in range(20)]
    for decisions in found:
        (_, _, first), (_, _, second) = decisions
        assert first == second and 150 + 500 <= first <= 150 + 1000
    assert len({decisions[0][2] for decisions in found}) > 10
    assert ends(3) == found[3]


def test_timed_follows_the_later_of_both_sides():
    """Virtual ranks are at the first match at 12; it takes 5. They are at the second one 34 after that; it takes 3."""
    condensed = Condensed(
        [Vertex([], [(0, 1)], 12, 5), Vertex([(0, 34)], [(0, 3)], None, 3)], {(0, 1): (0, 2), (0, 3): (1, 0)}
    )
    early = Timed(condensed)
    assert early.start(1000) == []
    assert early.arrived(0, 1, 1010) == [(0, 1, 1000 + 12 + 5 + 2)]
    assert early.arrived(0, 3, 1030) == [(0, 3, 1000 + 17 + 34 + 3)]
    late = Timed(condensed)
    late.start(1000)
    assert late.arrived(0, 1, 1100) == [(0, 1, 1100 + 5 + 2)]
    assert late.arrived(0, 3, 1500) == [(0, 3, 1500 + 3)]


def test_timed_waits_for_all_sandbox_members_and_auxiliary_vertices():
    vertices = [
        Vertex([], [], 40, 0),
        Vertex([(0, 2)], [(0, 1), (1, 1)], None, 10),
        Vertex([(0, 100), (1, 5)], [], None, 1),
        Vertex([(2, 0)], [(0, 4)], None, 7),
    ]
    planner = Timed(Condensed(vertices, {(0, 1): (1, 0), (1, 1): (1, 3), (0, 4): (3, 0)}))
    assert planner.start(0) == []
    assert planner.arrived(1, 1, 20) == []
    assert planner.arrived(0, 4, 60) == []  # issued early; what it depends on is not known yet
    assert sorted(planner.arrived(0, 1, 30)) == [(0, 1, 52), (0, 4, 141 + 7), (1, 1, 55)]


def test_timed_decides_at_the_start_what_virtual_ranks_alone_determine():
    planner = Timed(Condensed([Vertex([], [], 9, 1)], {(0, 1): (0, 5)}))
    assert planner.start(100) == [(0, 1, 115)]


@pytest.mark.parametrize("seed", range(25))
def test_timed_gives_the_solver_s_times_when_the_sandbox_keeps_to_them(seed):
    """Arrivals fed in the order of time, as they come in a replay."""
    rng = random.Random(seed)
    graph = random_graph(rng)
    matches = find_matches(graph)
    order, durations = dependency_order(graph, matches), random_durations(rng, graph, matches)
    sandbox = set(rng.sample(range(graph.world_size), rng.randint(1, graph.world_size)))
    start, end = solve(graph, matches, order, durations)
    condensed = condense(graph, matches, order, durations, sandbox)
    planner = Timed(condensed)
    decided = planner.start(1000)
    for when, rank, node in sorted((int(start[rank][node]), rank, node) for rank, node in condensed.output):
        decided += planner.arrived(rank, node, 1000 + when)
    assert {(rank, node): when - 1000 for rank, node, when in decided} == {
        (rank, node): int(end[rank][node]) for rank, node in condensed.output
    }
    assert len(decided) == len(condensed.output)
