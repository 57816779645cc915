"""The steady state: by hand, and against the same iteration unrolled many times, with ==."""

import random
from fractions import Fraction

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from prism_tools.calibrate.solver import solve
from prism_tools.calibrate.steady import steady_state
from prism_tools.graph.classes import classes_of
from prism_tools.graph.equations import equations
from prism_tools.graph.match import find_matches
from prism_tools.graph.model import Durations
from prism_tools.graph.order import dependency_order
from prism_tools.graph.schema import Match
from tests.calibrate.random_graphs import periodic_durations, periodic_graph
from tests.calibrate.test_solver import given_durations
from tests.graph.builder import build, comm, compute, step, wait

UNROLLED = 60


def steady(graph, durations, matches=None):
    matches = matches or find_matches(graph)
    if not isinstance(durations, Durations):
        durations = given_durations(durations)
    return steady_state(graph, matches, dependency_order(graph, matches), durations)


def path(found):
    return [tuple(row) for row in found.critical.tolist()]


def same(iteration, count=3):
    return lambda rank: iteration(rank) * count


def test_the_slower_rank_s_way_from_barrier_to_barrier():
    graph = build(2, {"world": [0, 1]}, same(lambda rank: [compute(), comm("barrier", "world"), compute(), step()]))
    found = steady(graph, [[10, 5, 1, 0] * 3, [30, 5, 2, 0] * 3])
    assert (found.problem, found.total_ns, found.iterations) == ("", 37, 1)
    assert path(found) == [(1, 8), (1, 9), (1, 10), (1, 11)]
    assert (found.since, found.period) == (1, 1), (
        "in iteration 0 rank 1 begins together with rank 0, later 1 ns after it"
    )


def test_the_cycle_goes_through_ranks_that_share_a_group():
    """Ranks 0 and 1 do one half, 2 and 3 the other; 0 works with 3 and 1 with 2. The lowest of each half never meet."""

    def iteration(rank):
        group = "a" if rank in (0, 3) else "b"
        return [compute(), comm("all_reduce", group, 8), compute(), comm("all_reduce", group, 8), compute(), step()]

    graph = build(4, {"a": [0, 3], "b": [1, 2]}, same(iteration))
    halves = [[50, 5, 1, 5, 1, 0] * 3, [1, 5, 50, 5, 1, 0] * 3]
    known = given_durations(halves)
    known.row = np.array([0, 0, 1, 1], np.int32)
    matches = find_matches(graph, classes=classes_of(graph, known.row))
    found = steady(graph, known, matches)
    assert matches.classes.lowest.tolist() == [0, 2] and found.total_ns == 50 + 5 + 50 + 5 + 1
    assert {rank for rank, _ in path(found)} in ({0, 3}, {1, 2})


def test_a_cycle_through_two_iterations_has_a_fraction_as_its_mean():
    """Each rank waits, an iteration later, for what the other sent after its long span: 50 + 25 and 30 + 28 ns."""

    def nodes(rank):
        mine = []
        for k in range(4):
            mine += [compute(), wait(*([f"in{k - 1}"] if k else [])), compute()]
            mine += [comm("recv", "world", 8, peer=1 - rank, name=f"in{k}", is_async=True), compute()]
            mine += [comm("send", "world", 8, peer=1 - rank, name=f"out{k}", is_async=True), step()]
        return mine

    graph = build(2, {"world": [0, 1]}, nodes)
    found = steady(graph, [[0, 0, 0, 28, 50, 25, 0] * 4, [0, 0, 0, 25, 30, 28, 0] * 4])
    assert (found.problem, found.total_ns, found.iterations, found.period) == ("", 133, 2, 2)
    assert {rank for rank, _ in path(found)} == {0, 1}


def test_the_mean_over_alike_iterations_counts():
    graph = build(1, {"world": [0]}, same(lambda rank: [compute(), step()], 4))
    found = steady(graph, [[900, 0, 10, 0, 20, 0, 60, 0]])
    assert (found.total_ns, found.iterations) == (30, 1), "the first iteration never counts"


def test_ranks_that_never_meet_keep_their_own_pace():
    graph = build(2, {"world": [0, 1]}, same(lambda rank: [compute(), step()]))
    found = steady(graph, [[10, 0] * 3, [30, 0] * 3])
    assert (found.total_ns, found.iterations, found.since, found.period) == (30, 1, -1, -1)
    assert path(found) == [(1, 4), (1, 5)]


def test_what_cannot_be_repeated_is_said():
    once = build(1, {"world": [0]}, same(lambda rank: [compute(), step()], 1))
    assert steady(once, [[1, 0]]).problem == "one iteration only"
    other = build(1, {"world": [0]}, lambda rank: [compute(), step(), compute(), compute(), step()])
    assert steady(other, [[1, 0, 1, 1, 0]]).problem == "no two counted iterations in a row do the same"

    def skewed(rank):  # rank 1 receives in the next iteration what rank 0 sends in this one
        messages = [comm("recv", "world", 8, peer=0) if rank else comm("send", "world", 8, peer=1)] * 3
        wanted = [compute(), *messages] if rank else [*messages, compute()]
        own = comm("barrier", f"own{rank}")
        return [node for message in wanted for node in (compute(), message, compute(), own, step())]

    graph = build(2, {"world": [0, 1], "own0": [0], "own1": [1]}, skewed)
    found = steady(graph, [[0] * len(graph.program_of(rank)) for rank in range(2)])
    assert found.problem == "rank 1 recv on world (train.py:1 recv) meets another iteration"

    def patient(rank):  # waits for what was issued two iterations before
        listed = []
        for k in range(5):
            listed += [compute(), comm("barrier", "world", name=f"b{k}", is_async=True)]
            listed += [compute(), wait(*([f"b{k - 2}"] if k > 1 else [])), step()]
        return listed

    found = steady(build(1, {"world": [0]}, patient), [[1] * 25])
    assert found.problem == "rank 0 wait (train.py:2 wait) waits for an iteration before the last"
    assert steady(build(1, {"world": [0]}, lambda rank: [compute()]), [[1]]) is None


def unrolled(graph, durations, matches):
    """Arrivals and ends of every iteration: int64[iterations, …], all ranks side by side."""
    start, end = solve(graph, matches, dependency_order(graph, matches), durations)
    count, rows = graph.iterations(), []
    for rank in range(graph.world_size):
        program = graph.program_of(rank)
        arrives = np.where(program.kind == 1, start[rank], end[rank])
        rows += [arrives.reshape(count, -1), end[rank].reshape(count, -1)]
    return np.concatenate(rows, axis=1)


def largest_mean(graph, matches, durations):
    """Karp's theorem on the dense matrix of longest paths from each node's end to each node's end one iteration later."""
    total, k = int(matches.base[-1]), 2
    segment = np.concatenate([graph.program_of(rank).segment for rank in range(graph.world_size)])
    before, here = np.flatnonzero(segment == k - 1), np.flatnonzero(segment == k)
    none, longest = -(2**50), {}
    for target, sources, delay in equations(graph, matches, dependency_order(graph, matches), durations):
        rows = [longest.get(s, np.where(before == s, 0, none)) for s in sources]
        if target >= 2 * total or segment[target % total] == k:
            longest[target] = np.max([*rows, np.full(len(before), none)], axis=0) + delay
    matrix = np.array([longest[node] for node in here])
    walks = [np.zeros(len(here), np.int64)]
    for _ in here:
        walks.append((matrix + walks[-1]).max(axis=1))
    means = [
        min(Fraction(int(walks[-1][v] - w[v]), len(here) - j) for j, w in enumerate(walks[:-1]))
        for v in range(len(here))
    ]
    return max(means)


def check_cycle(graph, matches, durations, found):
    """The cycle's own durations add up to its total: each node's, and of a match that it passes its duration once."""
    clock, nodes = 0, path(found)
    flats = [int(matches.base[rank]) + node for rank, node in nodes]
    for k, ((rank, node), here) in enumerate(zip(nodes, flats, strict=True)):
        match, after = matches.of_node[here], matches.of_node[flats[(k + 1) % len(flats)]]
        if match < 0 or match != after or len(flats) == 1:
            clock += int(durations.own[rank][node] + durations.tail[rank][node])
    assert clock == found.total_ns


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from((3, 50, 10**7)))
def test_equals_the_iteration_unrolled(seed, most):
    rng = random.Random(seed)
    graph = periodic_graph(rng, UNROLLED)
    matches = find_matches(graph)
    for match in np.flatnonzero(matches.kind == Match.PAIR):
        sender = int(matches.members[match][0])
        place = matches.node_of(sender) % (len(graph.program_of(matches.rank_of(sender))) // UNROLLED)
        if random.Random(f"{seed} {matches.rank_of(sender)} {place}").random() < 0.5:
            matches.kind[match] = Match.EAGER
    durations = periodic_durations(rng, graph, matches, most)
    found = steady(graph, durations, matches)
    assert found.problem == ""
    mean = Fraction(found.total_ns, found.iterations)
    assert mean == largest_mean(graph, matches, durations)
    check_cycle(graph, matches, durations, found)
    x = unrolled(graph, durations, matches)

    def recurs(k, p):
        return np.array_equal((x[k + p] - x[k]) * mean.denominator, np.full(x.shape[1], p * mean.numerator))

    least = min(((k, p) for k in range(UNROLLED) for p in range(1, UNROLLED - k) if recurs(k, p)), default=None)
    if found.period > 0 and found.since + found.period < UNROLLED:
        assert least == (found.since, found.period)
        assert all(recurs(k, found.period) for k in range(found.since, UNROLLED - found.period))
    else:
        assert least is None
