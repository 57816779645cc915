"""Durations: what was put into measured rows comes out again, from real slices, probes or our own data plane."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prism_tools.calibrate.durations import durations
from prism_tools.calibrate.measured import iteration_spread, middle, read_rows
from prism_tools.calibrate.probes import Finder, Key
from prism_tools.calibrate.solver import solve
from prism_tools.errors import PrismError
from prism_tools.graph.match import find_matches
from prism_tools.graph.model import Probes, Ragged
from prism_tools.graph.order import dependency_order
from prism_tools.graph.schema import DTYPES, UNKNOWN, Op, Reduce, Source
from tests.calibrate.random_graphs import make_eager, random_durations, random_graph
from tests.graph.builder import add_timing, build, comm, compute, step, wait


def rows(spans):
    """(host_issue, ready, start, end) of nodes that are ready when they start: ``spans`` lists (start, end)."""
    return [(start, start, start, end) for start, end in spans]


def measure(graph, starts, ends, ranks, slice_id=0):
    """Append a run of ``ranks`` in which nodes ran at these times."""
    add_timing(graph, {r: rows(zip(starts[r], ends[r], strict=True)) for r in ranks}, slice_id)


def probes(op, size, nbytes, duration, tails, spread=0, dtype="float32", reduce=Reduce.NONE, issue=None):
    """One probe."""
    columns = (op, DTYPES.index(dtype) if dtype else -1, reduce, size, nbytes, duration, spread, 5)
    rows = [[np.array(row, np.int64)] for row in (tails, issue or [0] * len(tails))]
    return Probes(*(np.array([value]) for value in columns), *rows)


def two_groups():
    """Ranks 0, 1 and 2, 3 are tensor-parallel groups; everybody meets in world."""

    def nodes(rank):
        tp = "tp0" if rank < 2 else "tp1"
        return [compute(), comm("all_reduce", tp, 64), compute(), comm("all_gather", "world", 32), compute(), step()]

    return build(4, {"world": [0, 1, 2, 3], "tp0": [0, 1], "tp1": [2, 3]}, nodes)


TIMES = [(0, 10), (10, 40), (40, 50), (50, 90), (90, 95), (95, 95)]
LATE = [(0, 25), (25, 42), (42, 50), (50, 90), (90, 95), (95, 95)]


def test_members_of_one_slice_are_real_and_the_rest_emulated():
    graph = two_groups()
    add_timing(graph, {0: rows(TIMES), 1: rows(LATE)}, 0)
    add_timing(graph, {2: rows(TIMES), 3: rows(TIMES)}, 1)
    got = durations(graph, find_matches(graph))
    own, tail, source = ([column[row] for row in got.row] for column in (got.own, got.tail, got.source))
    assert own[0].tolist() == [10, 15, 10, 40, 5, 0]  # from rank 1's arrival at 25 to rank 0's end at 40
    assert own[1].tolist() == [25, 15, 8, 40, 5, 0]
    assert tail[0].tolist() == [0, 0, 0, 0, 0, 0] and tail[1].tolist() == [0, 2, 0, 0, 0, 0]
    assert own[2].tolist() == [10, 30, 10, 40, 5, 0]
    assert [Source(s).name for s in source[0]] == ["REAL", "REAL", "REAL", "EMULATED", "REAL", "REAL"]
    assert got.row[2] == got.row[3] and len(got.own) == 3


def test_without_a_common_clock_the_last_arrival_shows_the_duration():
    graph = two_groups()
    add_timing(graph, {0: rows(TIMES), 1: rows(LATE), 2: rows(TIMES), 3: rows(TIMES)})
    graph.timing.clock_error = np.full(4, 50)
    got = durations(graph, find_matches(graph))
    assert got.own[got.row[0]].tolist()[1] == 17 and got.own[got.row[1]].tolist()[1] == 17
    assert not any(tail.any() for tail in got.tail)


def test_a_tail_longer_than_the_clocks_error_counts_however_short_the_duration():
    """The clocks may be off by 20: that is too much for a duration of 10, and nothing beside a member 500 late."""
    graph = build(2, {"world": [0, 1]}, lambda rank: [compute(), comm("all_reduce", "world", 8)])
    late = [(0, 40), (40, 550)]
    add_timing(graph, {0: rows(late), 1: rows([(0, 30), (30, 50)])}, 0)
    graph.timing.clock_error[:] = 20
    got = durations(graph, find_matches(graph))
    assert [int(got.own[row][1]) for row in got.row] == [20, 20], "rank 1's own: it held nobody up for longer"
    assert [int(got.tail[row][1]) for row in got.row] == [490, 0]


def test_a_probe_is_used_where_members_never_met():
    graph = two_groups()
    add_timing(graph, {0: rows(TIMES), 1: rows(LATE)}, 0)
    add_timing(graph, {2: rows(TIMES), 3: rows(TIMES)}, 1)
    graph.probes = probes(Op.ALL_GATHER, 4, 32, 33, [0, 1, 2, 3], spread=4)
    got = durations(graph, find_matches(graph))
    assert [int(got.own[got.row[rank]][3]) for rank in range(4)] == [33] * 4
    assert [int(got.tail[got.row[rank]][3]) for rank in range(4)] == [0, 1, 2, 3]
    assert all(got.source[row][3] == Source.PROBE and got.spread[row][3] == 4 for row in got.row)
    graph.probes = probes(Op.ALL_GATHER, 4, 16, 33, [0, 1, 2, 3], spread=4)
    got = durations(graph, find_matches(graph))
    assert (got.spread[0][3], got.bias[0][3], got.source[0][3]) == (4, 16, Source.FIT)  # half of 33, rounded to even


def several(*rows):
    """Probes of all_gather among 4 by (bytes, duration, spread)."""
    made = [probes(Op.ALL_GATHER, 4, size, took, [0, 0, 0, 0], spread) for size, took, spread in rows]
    columns = {name: [getattr(probe, name) for probe in made] for name in Probes.__dataclass_fields__}
    return Probes(**{name: sum(c, []) if isinstance(c[0], list) else np.concatenate(c) for name, c in columns.items()})


def test_between_two_probes_is_a_line():
    """32 bytes lie a quarter of the way from 16, which took 100, to 80, which took 180: 120, give or take 2 ¼ ¾ of 80."""
    finder = Finder(several((16, 100, 3), (80, 180, 5), (8, 90, 1), (400, 9000, 9)))
    key = Key(Op.ALL_GATHER, DTYPES.index("float32"), Reduce.NONE, 4, 32)
    found = finder.find(key)
    assert (found.duration, found.spread, found.bias, found.source) == (120, 5, 30, Source.FIT)
    found = finder.find(replace(key, bytes=800))  # beyond the largest: at worst twice as long
    assert (found.duration, found.spread, found.bias, found.source) == (9000, 9, 4500, Source.FIT)
    found = finder.find(replace(key, bytes=80))
    assert (found.duration, found.spread, found.bias, found.source) == (180, 5, 0, Source.PROBE)
    assert finder.find(replace(key, size=8)) is None and finder.find(replace(key, op=Op.BARRIER)) is None


@pytest.mark.parametrize("change", [{"dtype": DTYPES.index("float16")}, {"reduce": Reduce.MAX}])
def test_another_type_or_reduction_is_a_fit(change):
    finder = Finder(several((16, 100, 3)))
    key = Key(Op.ALL_GATHER, DTYPES.index("float32"), Reduce.NONE, 4, 16)
    assert (finder.find(key).source, finder.find(replace(key, **change)).source) == (Source.PROBE, Source.FIT)


def test_fewer_processes_than_members_are_a_fit():
    made = several((32, 100, 3))
    assert made.processes.tolist() == [4]
    made.processes = np.array([2], np.int32)
    graph = two_groups()
    add_timing(graph, {0: rows(TIMES), 1: rows(LATE)}, 0)
    add_timing(graph, {2: rows(TIMES), 3: rows(TIMES)}, 1)
    graph.probes = made
    got = durations(graph, find_matches(graph))
    assert [Source(s).name for s in got.source[0]] == ["REAL", "REAL", "REAL", "FIT", "REAL", "REAL"]
    assert (got.own[0][3], got.spread[0][3], got.bias[0][3]) == (100, 3, 50), "four may take twice as long as two"


def test_a_pairs_tails_are_the_senders_and_the_receivers():
    graph = build(
        2, {"world": [0, 1]}, lambda rank: [compute(), comm("recv" if rank == 0 else "send", "world", 8, peer=1 - rank)]
    )
    for rank in (0, 1):
        add_timing(graph, {rank: rows([(0, 10), (10, 20)])}, rank)
    graph.probes = probes(Op.SEND, 2, 8, 7, [1, 4])
    got = durations(graph, find_matches(graph))
    assert [got.tail[row].tolist() for row in got.row] == [[0, 4], [0, 1]]
    assert [got.own[row].tolist() for row in got.row] == [[10, 7], [10, 7]]


def test_rooted_tails_turn_with_the_root():
    graph = build(3, {"world": [0, 1, 2]}, lambda rank: [compute(), comm("broadcast", "world", 8, root=1)])
    for rank in range(3):
        add_timing(graph, {rank: rows([(0, 10), (10, 20)])}, rank)
    graph.probes = probes(Op.BROADCAST, 3, 8, 7, [0, 3, 5])
    got = durations(graph, find_matches(graph))
    assert [int(got.tail[row][1]) for row in got.row] == [5, 0, 3]


def test_an_unmeasured_rank_borrows_from_its_class_and_its_group_from_a_group():
    graph = two_groups()
    add_timing(graph, {0: rows(TIMES), 1: rows(LATE)}, 0)
    got = durations(graph, find_matches(graph))
    for clone, rank in ((2, 0), (3, 1)):
        assert got.row[clone] == got.row[rank]
    assert got.source[got.row[2]][1] == Source.REAL and got.own[got.row[2]][1] == 15


def test_an_unmeasured_rank_is_known_no_better_than_its_class_agrees():
    """Ranks 0 and 1 took 10 and 16: rank 2, which may be like either, is 10 ± 3; what each took itself is not in doubt."""
    graph = build(3, {"world": [0, 1, 2]}, lambda rank: [compute(), compute()])
    for rank, own in ((0, 10), (1, 16)):
        for _ in range(3):
            add_timing(graph, {rank: rows([(0, own), (own, own + 5)])}, rank)
    got = durations(graph, find_matches(graph))
    assert [got.own[row].tolist() for row in got.row] == [[10, 5], [16, 5], [10, 5]]
    assert [got.spread[row].tolist() for row in got.row] == [[0, 0], [0, 0], [3, 0]]


def test_repeats_of_a_collective():
    """Three runs on one clock. Last arrivals at 20, 20, 24; members end 5, 9, 6 and 7, 8, 12 later: the medians are 6 and 8. The
    first ends come 5, 8, 6 later: half of their interquartile range is 0.75. Without a clock each run shows the least of what
    a member took from its own arrival: 5, 9 and 6 (rank 1 came last in the second run), of which the median is 6."""
    graph = build(2, {"world": [0, 1]}, lambda rank: [compute(), comm("all_reduce", "world", 8)])
    for run, (arrivals, ends) in enumerate([((20, 12), (25, 27)), ((20, 19), (29, 28)), ((4, 24), (30, 36))]):
        columns = zip(arrivals, ends, strict=True)
        add_timing(graph, {r: rows([(0, at), (at, end)]) for r, (at, end) in enumerate(columns)}, run)
    got = durations(graph, find_matches(graph))
    assert [int(got.own[row][1]) for row in got.row] == [6, 6] and [int(got.tail[row][1]) for row in got.row] == [0, 2]
    assert [int(got.spread[row][1]) for row in got.row] == [1, 1]
    graph.timing.clock_error[:] = 1000
    got = durations(graph, find_matches(graph))
    assert [int(got.own[row][1]) for row in got.row] == [9, 9]
    assert [int(got.spread[row][1]) for row in got.row] == [2, 2] and not any(row.any() for row in got.tail)


def members_apart():
    """Three runs in which rank 1 comes last and stays 70, 80 and 120; rank 0 always goes 50 after it came."""
    graph = build(2, {"world": [0, 1]}, lambda rank: [compute(), comm("all_reduce", "world", 8)])
    for run, stay in enumerate((70, 80, 120)):
        times = {0: [(0, 20), (20, 250)], 1: [(0, 200), (200, 200 + stay)]}
        add_timing(graph, {rank: rows(spans) for rank, spans in times.items()}, run)
    return graph


def test_how_far_members_disagree_is_each_members_own():
    """Who always goes after 50 is not in doubt because another member is: that one's quartiles are 75 and 100."""
    got = durations(graph := members_apart(), find_matches(graph))
    assert [(int(got.own[row][1]), int(got.tail[row][1])) for row in got.row] == [(50, 0), (50, 30)]
    assert [int(got.spread[row][1]) for row in got.row] == [0, 12]


@pytest.mark.parametrize(("error", "unseen"), [(1000, 150), (20, 40)])
def test_what_clocks_do_not_show_of_a_member_is_in_doubt(error, unseen):
    """The last arrival shows 80. Rank 0 stayed 230 each time: it may have gone on 150 later than the first, or by as much as
    two clocks are off. Rank 1 once stayed for less than that."""
    graph = members_apart()
    graph.timing.clock_error[:] = error
    got = durations(graph, find_matches(graph))
    assert [(int(got.own[row][1]), int(got.tail[row][1])) for row in got.row] == [(80, 0)] * 2
    assert [(int(got.spread[row][1]), int(got.bias[row][1])) for row in got.row] == [(12, unseen), (12, 0)]


def test_members_of_one_run_disagree_between_iterations():
    """On one clock: rank 1 leaves 0, 4, 8 and 12 later than rank 0, the first of them in the warm-up."""
    graph = build(2, {"world": [0, 1]}, lambda rank: [compute(), comm("all_reduce", "world", 8), step()] * 4)
    spans = {0: [], 1: []}
    for k, start in enumerate((0, 100, 200, 300)):
        for rank in (0, 1):
            end = start + 20 + 4 * k * rank
            spans[rank] += [(start, start + 10), (start + 10, end), (end, end)]
    add_timing(graph, {rank: rows(times) for rank, times in spans.items()})
    got = durations(graph, find_matches(graph))
    assert [got.tail[row][1::3].tolist() for row in got.row] == [[0] * 4, [0, 4, 8, 12]]
    assert [got.spread[row][1::3].tolist() for row in got.row] == [[0] * 4, [2] * 4]


def test_a_group_that_nobody_measured_is_known_no_better_than_groups_agree():
    """Of three equal groups one took 30, one 20: the third may be like either."""
    groups = {"tp0": [0, 1], "tp1": [2, 3], "tp2": [4, 5]}
    graph = build(6, groups, lambda rank: [compute(), comm("all_reduce", f"tp{rank // 2}", 8)])
    for first, end in ((0, 40), (2, 30)):
        add_timing(graph, {rank: rows([(0, 10), (10, end)]) for rank in (first, first + 1)}, first)
    got = durations(graph, find_matches(graph))
    assert [int(got.own[row][1]) for row in got.row] == [30, 30, 20, 20, 30, 30]
    assert [int(got.spread[row][1]) for row in got.row] == [0, 0, 0, 0, 5, 5]


def test_ranks_of_a_program_may_have_groups_that_it_does_not_use():
    """Ranks 0 and 1 have one group, rank 3 two: who has none in its second place is like others that have none."""
    graph = build(4, {"world": [0, 1, 2, 3], "idle": [0, 2]}, lambda rank: [compute(), comm("barrier", "world")])
    graph.ranks.slots = Ragged.from_rows([[0, 1], [0], [0, 1], [0]], np.int32)
    add_timing(graph, {0: rows([(0, 10), (10, 20)])})
    add_timing(graph, {1: rows([(0, 14), (14, 20)])}, 1)
    assert read_rows(graph).alike == {2: [0, 1], 3: [1]}
    got = durations(graph, find_matches(graph))
    assert [int(got.own[row][0]) for row in got.row] == [10, 14, 10, 14]
    assert [int(got.spread[row][0]) for row in got.row] == [0, 0, 2, 0]


def test_ranks_that_nobody_measured_are_named():
    graph = build(4, {"world": [0, 1, 2, 3]}, lambda rank: [compute()] * (1 + rank // 2))
    with pytest.raises(PrismError, match="no rank was ever measured; run prism-slice"):
        durations(graph, find_matches(graph))
    add_timing(graph, {0: rows([(0, 5)])})
    with pytest.raises(PrismError, match="ranks 2-3 were never measured; run prism-slice"):
        durations(graph, find_matches(graph))


def test_unknown_times_are_an_error_in_iterations_and_nothing_after_them():
    def nodes(rank):
        return [compute(), step(), compute(), step(), compute()]

    graph = build(1, {"world": [0]}, nodes)
    nothing = (UNKNOWN,) * 4
    add_timing(graph, {0: rows([(0, 5), (5, 5), (5, 9), (9, 9)]) + [nothing]})
    got = durations(graph, find_matches(graph))
    assert got.own[0].tolist() == [5, 0, 4, 0, 0] and got.source[0][4] == Source.UNKNOWN
    graph.timing.end[0][2] = UNKNOWN
    with pytest.raises(PrismError, match="rank 0 compute .* was never measured"):
        durations(graph, find_matches(graph))


def test_a_wait_owns_what_is_left_after_its_sources():
    def nodes(rank):
        return [compute(), comm("all_reduce", "world", 8, name="a", is_async=True), compute(), wait("a"), compute()]

    graph = build(1, {"world": [0]}, nodes)
    add_timing(graph, {0: rows([(0, 10), (10, 60), (10, 30), (30, 63), (63, 70)])})
    assert durations(graph, find_matches(graph)).own[0].tolist() == [10, 50, 20, 3, 7]


def test_repeats_give_median_and_spread():
    graph = build(1, {"world": [0]}, lambda rank: [compute()])
    for k, end in enumerate((10, 14, 11, 12, 30)):
        add_timing(graph, {0: rows([(0, end)])}, slice_id=k // 2)
    got = durations(graph, find_matches(graph))
    assert got.own[0].tolist() == [12] and got.spread[0].tolist() == [2]  # half of 14 - 11, rounded to even


def test_spread_of_one_run_comes_from_the_iterations():
    graph = build(1, {"world": [0]}, lambda rank: [compute(), step()] * 5 + [compute()])
    program = graph.program_of(0)
    own = np.array([99.0, 0, 10, 0, 12, 0, 16, 0, 10, 0, 7])
    spread = iteration_spread(program, own)
    assert spread.tolist() == [1.5, 0] * 5 + [0]


def test_middle_ignores_what_is_unknown():
    nan = np.nan
    median, spread = middle(np.array([[1, nan, 4, nan], [3, 5, nan, nan], [2, 9, nan, nan]]))
    np.testing.assert_array_equal(median, [2, 7, 4, nan])
    np.testing.assert_array_equal(spread, [0.5, 1, nan, nan])


@given(st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_solving_measured_durations_gives_the_measured_times(seed):
    """Whatever a run in one slice was like, on clocks with known offsets, its calibration reproduces it to the ns."""
    rng = random.Random(seed)
    graph = random_graph(rng)
    matches = find_matches(graph)
    make_eager(rng, matches)
    order = dependency_order(graph, matches)
    start, end = solve(graph, matches, order, random_durations(rng, graph, matches))
    offset = [rng.randint(-(10**6), 10**6) for _ in start]
    shifted = [[row + 10**9 - o for row, o in zip(part, offset, strict=True)] for part in (start, end)]
    measure(graph, *shifted, range(graph.world_size))
    graph.timing.clock_offset = np.array(offset)
    _, again = solve(graph, matches, order, durations(graph, matches))
    for mine, measured in zip(again, end, strict=True):
        assert mine.tolist() == measured.tolist()


def test_ranks_of_one_slice_meet_in_our_data_plane_when_their_group_crosses_its_edge():
    """Both ends of the message ran for real, but in a group of four: the assistant played it."""
    graph = build(
        4,
        {"world": [0, 1, 2, 3]},
        lambda rank: [compute(), comm("recv" if rank % 2 else "send", "world", 8, peer=rank ^ 1)],
    )
    for first in (0, 2):
        add_timing(graph, {rank: rows([(0, 10), (10, 11)]) for rank in (first, first + 1)}, first)
    graph.probes = probes(Op.SEND, 2, 8, 7, [1, 4])
    got = durations(graph, find_matches(graph))
    assert [(int(got.own[row][1]), int(got.source[row][1])) for row in got.row] == [(7, Source.PROBE)] * 4
