"""Who waited for whom: by hand, and that the critical path's parts are the whole."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prism_tools.analyze.waits import held_until, lateness, path_shares, slow_span
from prism_tools.calibrate import calibrate
from prism_tools.calibrate.schedule import timeline
from prism_tools.errors import PrismError
from prism_tools.graph.match import find_matches
from prism_tools.graph.order import dependency_order
from prism_tools.graph.schema import Kind, Source
from tests.analyze.example import MS, bare, calibrated
from tests.calibrate.random_graphs import make_eager, random_durations, random_graph
from tests.graph.builder import add_timing, build, comm, compute, step


def test_waiting_ends_with_the_last_arrival():
    graph = calibrated()
    held = held_until(graph, find_matches(graph))
    assert (held[:8] // MS).tolist() == [0, 14, 16, 17, 17, 22, 22, 23]
    assert (held[24:32] // MS).tolist() == [0, 14, 16, 17, 17, 22, 22, 23]


def test_lateness_counts_iterations_after_the_first():
    graph = calibrated()
    matches = find_matches(graph)
    late = lateness(graph, matches)
    late_by = dict(zip(late.match.tolist(), late.lag.tolist(), strict=True))
    assert sorted(late_by.values()) == [0, 0, 4 * MS, 4 * MS]
    assert {matches.rank_of(int(node)) for node in late.last[late.lag > 0]} == {1}


def test_the_path_by_kind_rank_and_source():
    graph = calibrated()
    shares = path_shares(graph, find_matches(graph))
    assert shares.total == 2 * 23 * MS
    assert shares.by_kind == {"compute": 24 * MS, "all_reduce": 4 * MS, "all_gather": 10 * MS, "wait calls": 0}
    assert +shares.waiting == Counter({1: 8 * MS})
    assert shares.by_source == {Source.REAL: 46 * MS}


def test_without_a_timeline_it_says_what_to_run():
    with pytest.raises(PrismError, match="no timeline; run prism-calibrate"):
        held_until(bare(), find_matches(bare()))


def test_the_slow_span_is_named_by_its_neighbours():
    span = slow_span(calibrated(iterations=4))
    assert (span.rank, span.excess, span.times) == (1, 3 * 4 * MS, 3)
    assert (span.after, span.before) == ("train.py:9 step", "train.py:8 forward")
    assert slow_span(calibrated(late=0)) is None
    assert slow_span(bare()) is None


def test_a_slow_span_is_one_beside_equal_ranks_only():
    """A pipeline of two stages, twice: the second stage computes more by nature; only rank 3 is slow, and no collective
    tells."""
    groups = {"left": [0, 2], "right": [1, 3]}

    def nodes(rank):
        transfer = comm(
            "send" if rank < 2 else "recv",
            "left" if rank % 2 == 0 else "right",
            4,
            peer=(rank + 2) % 4,
            at="pipe.py:5 pass_on",
        )
        return [compute(), transfer, compute(), step()] * 3

    graph = build(4, groups, nodes)
    for rank in range(4):
        first, second = (5, 1) if rank < 2 else (1, 20 + 7 * (rank == 3))
        clock, times = 0, []
        for _ in range(3):
            spans = [(clock, clock + first), (clock + first, clock + 6), (clock + 6, clock + 6 + second)]
            spans += [(clock + 6 + second, clock + 6 + second)]
            times += [(start * MS, start * MS, start * MS, end * MS) for start, end in spans]
            clock += 6 + second
        add_timing(graph, {rank: times})
    span = slow_span(calibrate(graph))
    assert (span.rank, span.excess // span.times) == (3, 7 * MS)
    assert span.after == "pipe.py:5 pass_on"


@given(st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_shares_add_up_and_waiting_lies_inside_the_nodes(seed):
    rng = random.Random(seed)
    graph = random_graph(rng)
    matches = find_matches(graph)
    make_eager(rng, matches)
    graph.durations = random_durations(rng, graph, matches)
    graph.timeline = timeline(graph, matches, dependency_order(graph, matches), graph.durations)
    shares = path_shares(graph, matches)
    assert sum(shares.by_kind.values()) + sum(shares.waiting.values()) == shares.total == sum(shares.by_source.values())
    assert min(shares.by_kind.values(), default=0) >= 0
    held = held_until(graph, matches)
    for rank in range(graph.world_size):
        start, end = (column[graph.timeline.row[rank]] for column in (graph.timeline.start, graph.timeline.end))
        mine = held[matches.base[rank] : matches.base[rank + 1]]
        assert (start <= mine).all() and (mine <= end).all()
        own, tail = graph.durations.own[rank], graph.durations.tail[rank]
        comm = graph.program_of(rank).kind == Kind.COMM
        assert (mine + own + tail == end)[comm].all()
