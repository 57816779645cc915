"""The solve: known schedules, and equality with a reference that knows nothing of its order or its equations."""

import math
import random
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from prism_tools.calibrate.solver import critical_path, evaluate, solve
from prism_tools.graph.match import find_matches
from prism_tools.graph.model import Durations, Ragged
from prism_tools.graph.order import dependency_order
from prism_tools.graph.schema import Kind, Match
from tests.calibrate.random_graphs import make_eager, random_durations, random_graph
from tests.graph.builder import build, comm, compute, step, wait

SEEDS = st.integers(0, 2**32)


def given_durations(own, tail=None):
    """Durations with one row a rank."""
    own = [np.array(row, np.int64) for row in own]
    tail = [np.array(row, np.int64) for row in tail] if tail else [row * 0 for row in own]
    spread, bias, source = ([row * 0 for row in own] for _ in range(3))
    return Durations(np.arange(len(own), dtype=np.int32), own, tail, spread, bias, source)


def solved(graph, own, tail=None):
    matches = find_matches(graph)
    start, end = solve(graph, matches, dependency_order(graph, matches), given_durations(own, tail))
    return [row.tolist() for row in start], [row.tolist() for row in end]


def test_a_collective_ends_after_its_last_arrival():
    graph = build(2, {"world": [0, 1]}, lambda rank: [compute(), comm("all_reduce", "world", 4), compute(), step()])
    start, end = solved(graph, [[10, 5, 1, 0], [30, 5, 2, 0]], [[0, 0, 0, 0], [0, 3, 0, 0]])
    assert start == [[0, 10, 35, 36], [0, 30, 38, 40]]
    assert end == [[10, 35, 36, 36], [30, 38, 40, 40]]


def test_an_asynchronous_operation_overlaps_and_its_wait_ends_with_it():
    def nodes(rank):
        return [compute(), comm("all_reduce", "world", 4, name="a", is_async=True), compute(), wait("a"), compute()]

    start, end = solved(build(2, {"world": [0, 1]}, nodes), [[10, 50, 20, 2, 5], [25, 50, 100, 2, 5]])
    assert start == [[0, 10, 10, 30, 77], [0, 25, 25, 125, 127]]
    assert end == [[10, 75, 30, 77, 82], [25, 75, 125, 127, 132]]


def test_roots_and_leaves_leave_early():
    def nodes(rank):
        first = comm("broadcast", "world", 4, root=0)
        return [compute(), first, compute(), comm("reduce", "world", 4, root=0), compute()]

    _, end = solved(build(2, {"world": [0, 1]}, nodes, "nccl"), [[10, 1, 0, 7, 0], [100, 1, 0, 7, 0]])
    assert end == [[10, 11, 11, 108, 108], [100, 101, 101, 108, 108]]
    _, end = solved(build(2, {"world": [0, 1]}, nodes, "nccl"), [[100, 1, 0, 7, 0], [10, 1, 0, 7, 0]])
    assert end == [[100, 101, 101, 108, 108], [10, 101, 101, 108, 108]]


def test_gloo_roots_wait_for_whom_they_serve():
    def ends(op, spans):
        nodes = [compute(), comm(op, "world", 4, root=0)]
        graph = build(len(spans), {"world": list(range(len(spans)))}, lambda rank: nodes)
        return [row[1] for row in solved(graph, [[span, 1] for span in spans])[1]]

    # measured on gloo with four members, one of them 100 ms late: who else was held up
    assert ends("broadcast", [0, 0, 0, 100]) == [1, 101, 1, 101]
    assert ends("broadcast", [0, 100, 0, 0]) == [101, 101, 1, 101]
    assert ends("broadcast", [100, 0, 0, 0]) == [101, 101, 101, 101]
    assert ends("scatter", [0, 0, 0, 100]) == [101, 1, 1, 101]
    assert ends("gather", [100, 0, 0, 0]) == [101, 101, 101, 101]
    assert ends("gather", [0, 100, 0, 0]) == [101, 101, 1, 1]


def test_send_and_receive_are_rendezvous_unless_eager():
    graph = build(
        2, {"world": [0, 1]}, lambda rank: [compute(), comm("recv" if rank else "send", "world", 4, peer=1 - rank)]
    )
    assert solved(graph, [[10, 5], [50, 5]])[1] == [[10, 55], [50, 55]]
    matches = find_matches(graph)
    matches.kind[:] = Match.EAGER
    _, end = solve(graph, matches, dependency_order(graph, matches), given_durations([[10, 5], [50, 5]]))
    assert [row.tolist() for row in end] == [[10, 15], [50, 55]]


def test_the_critical_path_jumps_to_the_last_arrival():
    graph = build(2, {"world": [0, 1]}, lambda rank: [compute(), comm("all_reduce", "world", 4), compute(), step()])
    matches = find_matches(graph)
    order = dependency_order(graph, matches)
    solution = evaluate(graph, matches, order, given_durations([[10, 5, 9, 0], [30, 5, 2, 0]]))
    path = critical_path(solution, matches, 3, np.ones(8, bool))
    assert path.tolist() == [[1, 0], [1, 1], [0, 1], [0, 2], [0, 3]]
    inside = np.array([False, False, True, True] * 2)
    assert critical_path(solution, matches, 3, inside).tolist() == [[0, 2], [0, 3]]


def reference(graph, matches, durations):
    """Ends of all nodes: the rules of the semantics, applied again and again until nothing moves."""
    end = [np.zeros(len(graph.program_of(rank)), np.int64) for rank in range(graph.world_size)]
    where = [(matches.rank_of(n), matches.node_of(n)) for n in range(int(matches.base[-1]))]

    def ready(rank, node):
        program = graph.program_of(rank)
        before = [n for n in range(node) if program.lane[n] == program.lane[node] == 0][-1:]
        before += [int(a) for a, b in program.edges if b == node]
        return max([int(end[rank][n]) for n in before], default=0)

    def waits_for(rank, node):
        flat = int(matches.base[rank]) + node
        match = int(matches.of_node[flat])
        members = [where[n] for n in matches.members[match]]
        group = graph.groups.members[matches.group[match]]
        root = int(graph.program_of(rank).root[node])
        root = int(group[root]) if root >= 0 else -1
        kind = Match(int(matches.kind[match]))
        if kind == Match.TREE:
            return in_tree(members, rank, root)
        everybody = (
            kind in (Match.COLLECTIVE, Match.PAIR)
            or (kind in (Match.ROOT_LAST, Match.ROOTED) and rank == root)
            or (kind == Match.EAGER and (rank, node) == members[1])
        )
        if everybody:
            return members
        with_root = kind in (Match.ROOT_FIRST, Match.ROOTED)
        return [(rank, node)] + [member for member in members if with_root and member[0] == root]

    def in_tree(members, rank, root):
        """Ancestors, self and children; the parent of place v is v without its highest bit."""
        ranks = [member[0] for member in members]
        place = {other: (k - ranks.index(root)) % len(ranks) for k, other in enumerate(ranks)}

        def parent(v):
            return v - 2 ** int(math.log2(v)) if v else -1

        line = [place[rank]]
        while line[-1]:
            line.append(parent(line[-1]))
        return [m for m in members if place[m[0]] in line or parent(place[m[0]]) == place[rank]]

    moved = True
    while moved:
        moved = False
        for rank, node in where:
            own = int(durations.own[durations.row[rank]][node])
            if graph.program_of(rank).kind[node] == Kind.COMM:
                own += int(durations.tail[durations.row[rank]][node])
                now = max(ready(*member) for member in waits_for(rank, node)) + own
            else:
                now = ready(rank, node) + own
            moved |= now != end[rank][node]
            end[rank][node] = now
    return end


@given(SEEDS)
@settings(max_examples=60, deadline=None)
def test_equals_a_fixpoint_of_the_rules(seed):
    rng = random.Random(seed)
    graph = random_graph(rng, events=rng.randint(1, 6))
    matches = find_matches(graph)
    make_eager(rng, matches)
    durations = random_durations(rng, graph, matches, most=rng.choice((3, 1000)))
    _, end = solve(graph, matches, dependency_order(graph, matches), durations)
    for mine, expected in zip(end, reference(graph, matches, durations), strict=True):
        assert mine.tolist() == expected.tolist()


@given(SEEDS)
@settings(max_examples=40, deadline=None)
def test_nothing_ends_earlier_when_a_node_takes_longer(seed):
    rng = random.Random(seed)
    graph = random_graph(rng)
    matches = find_matches(graph)
    order, durations = dependency_order(graph, matches), random_durations(rng, graph, matches)
    _, before = solve(graph, matches, order, durations)
    rank = rng.randrange(graph.world_size)
    node = rng.randrange(len(durations.own[rank]))
    durations.own[rank][node] += 500
    if graph.program_of(rank).kind[node] == Kind.COMM:  # a match has one duration
        for member in matches.members[int(matches.of_node[matches.base[rank] + node])]:
            durations.own[matches.rank_of(member)][matches.node_of(member)] = durations.own[rank][node]
    _, after = solve(graph, matches, order, durations)
    assert all((b >= a).all() for a, b in zip(before, after, strict=True))
    if graph.program_of(rank).kind[node] != Kind.COMM:
        assert all((b <= a + 500).all() for a, b in zip(before, after, strict=True))


@given(SEEDS)
@settings(max_examples=40, deadline=None)
def test_ranks_may_have_other_numbers(seed):
    """Rank r becomes ``name[r]``, at the same place in its groups: the times are the same, whatever the order of ranks."""
    rng = random.Random(seed)
    graph = random_graph(rng)
    durations = random_durations(rng, graph, find_matches(graph))
    name = np.array(rng.sample(range(graph.world_size), graph.world_size), np.int32)
    was = np.argsort(name)
    members = Ragged.from_rows([name[row] for row in graph.groups.members], np.int32)
    columns = {field: getattr(graph.ranks, field)[was] for field in ("program", "values", "local_rank", "node")}
    ranks = replace(graph.ranks, slots=Ragged.from_rows([graph.ranks.slots[rank] for rank in was], np.int32), **columns)
    other = replace(graph, ranks=ranks, groups=replace(graph.groups, members=members))
    first, second = (
        np.concatenate(solve(each, matches, dependency_order(each, matches), known)[1])
        for each, matches, known in (
            (graph, find_matches(graph), durations),
            (other, find_matches(other), replace(durations, row=durations.row[was])),
        )
    )
    bounds = np.cumsum([0, *(len(graph.program_of(rank)) for rank in range(graph.world_size))])
    moved = np.concatenate([first[bounds[rank] : bounds[rank + 1]] for rank in was])
    assert np.array_equal(moved, second)


@given(SEEDS)
@settings(max_examples=40, deadline=None)
def test_the_critical_path_has_no_gaps(seed):
    rng = random.Random(seed)
    graph = random_graph(rng)
    matches = find_matches(graph)
    order, durations = dependency_order(graph, matches), random_durations(rng, graph, matches)
    solution = evaluate(graph, matches, order, durations)
    _, end = solve(graph, matches, order, durations)
    last = int(np.argmax(np.concatenate(end)))
    path = critical_path(solution, matches, last, np.ones(int(matches.base[-1]), bool)).tolist()
    clock = 0
    for here, after in zip(path, path[1:] + [None], strict=True):
        of_node = [matches.of_node[matches.base[rank] + node] for rank, node in filter(None, (here, after))]
        if len(of_node) == 2 and of_node[0] >= 0 and of_node[0] == of_node[1]:
            continue  # the last to arrive; the path goes on from the other member
        rank, node = here
        clock += durations.own[rank][node] + durations.tail[rank][node]
        assert clock == end[rank][node]
