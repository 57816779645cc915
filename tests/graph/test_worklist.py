"""The worklist: what the equations say, without an order; long spans; and ranks that wait for each other."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prism_tools.calibrate import calibrate
from prism_tools.errors import PrismError
from prism_tools.graph import compiled
from prism_tools.graph.equations import equations
from prism_tools.graph.match import find_matches
from prism_tools.graph.order import dependencies, dependency_order
from prism_tools.graph.worklist import arrivals, ends, gaps
from tests.bench import clusters
from tests.calibrate.random_graphs import make_eager, random_durations, random_graph
from tests.graph.builder import build, comm, compute


def check(graph, matches, durations):
    """Ends and arrivals are what the equations say, one after the other."""
    order, total = dependencies(graph, matches), int(matches.base[-1])
    end = ends(order, durations)
    arrival = arrivals(order, end)
    assert "steps" not in vars(order)
    value = {}
    for target, sources, delay in equations(graph, matches, order, durations):
        value[target] = max((value[source] for source in sources), default=0) + delay
    assert end.tolist() == [value[node] for node in range(total)]
    met = np.flatnonzero(matches.of_node >= 0)
    assert arrival[met].tolist() == [value[total + node] for node in met.tolist()]


@given(st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_equals_the_equations(seed):
    rng = random.Random(seed)
    graph = random_graph(rng)
    matches = find_matches(graph)
    make_eager(rng, matches)
    check(graph, matches, random_durations(rng, graph, matches, most=rng.choice((3, 10**10))))


@pytest.mark.parametrize("overlap", [False, True])
def test_compiled_equals_the_equations(monkeypatch, overlap):
    monkeypatch.setattr(compiled, "SMALL", 0)
    graph = clusters.build(clusters.Cluster(tp=2, pp=3, dp=2, ep=2, chunks=2, microbatches=3, overlap=overlap))
    matches = find_matches(graph)
    make_eager(random.Random(0), matches)
    check(graph, matches, clusters.durations(graph, np.arange(graph.world_size)))
    rooted = random_graph(random.Random(3), ranks=6, events=12)
    matches = find_matches(rooted)
    check(rooted, matches, random_durations(random.Random(3), rooted, matches))


def test_spans_of_more_than_two_seconds_are_exact():
    graph = build(2, {"w": [0, 1]}, lambda rank: [compute(), comm("barrier", "w"), compute()])
    matches = find_matches(graph)
    durations = random_durations(random.Random(0), graph, matches)
    order = dependencies(graph, matches)
    durations.tail[0][1] = durations.tail[1][1] = 0
    assert gaps(order, durations).dtype == np.int32
    durations.own[0][:] = [2**31 - 1, 1, 0]
    durations.own[1][:] = [5, 1, 2**40]
    assert gaps(order, durations).dtype == np.int64
    assert ends(order, durations).tolist() == [2**31 - 1, 2**31, 2**31, 5, 2**31, 2**31 + 2**40]


def test_ranks_that_wait_for_each_other_are_named():
    def nodes(rank):
        groups = ["w", "v"] if rank == 0 else ["v", "w"]
        return [compute()] + [comm("barrier", group) for group in groups]

    graph = build(2, {"w": [0, 1], "v": [0, 1]}, nodes)
    matches = find_matches(graph)
    graph.durations = random_durations(random.Random(0), graph, matches)
    with pytest.raises(PrismError) as expected:
        dependency_order(graph, matches)
    with pytest.raises(PrismError) as caught:
        calibrate(graph)
    assert (str(caught.value), caught.value.detail) == (str(expected.value), expected.value.detail)
    assert "rank 0 barrier on w" in str(caught.value) and "waits for rank 1" in str(caught.value)
