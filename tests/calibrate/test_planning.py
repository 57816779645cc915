"""Planning: what a change gains, by hand, and by durations edited by hand and solved."""

import math
import random
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prism_tools.calibrate.planning import Change, Planner, plan
from prism_tools.calibrate.schedule import timeline
from prism_tools.calibrate.selectors import parse_selector, told_apart
from prism_tools.calibrate.solver import solve
from prism_tools.cli.changes import gain_text
from prism_tools.errors import PrismError
from prism_tools.graph.match import find_matches
from prism_tools.graph.model import Durations
from prism_tools.graph.order import dependency_order
from prism_tools.graph.schema import Kind, Source
from tests.bench import clusters
from tests.calibrate.random_graphs import periodic_durations, periodic_graph, random_replicas
from tests.calibrate.test_solver import given_durations
from tests.graph.builder import build, comm, compute, differences, step
from tests.graph.test_classes import copied_durations


def calibrated(graph, durations):
    matches = find_matches(graph)
    graph.durations = durations
    graph.timeline = timeline(graph, matches, dependency_order(graph, matches), durations)
    graph.stage = "calibrated"
    return graph


def example(backend="gloo"):
    """Two ranks, three iterations: 10 (rank 1: 30) ns, all_reduce 5, then 3 ns: an iteration lasts 38 ns."""

    def nodes(rank):
        return [compute(), comm("all_reduce", "world", 64, at="train.py:5 forward"), compute(), step()] * 3

    graph = build(2, {"world": [0, 1]}, nodes, backend)
    return calibrated(graph, given_durations([[10, 5, 3, 0] * 3, [30, 5, 3, 0] * 3]))


def change(how, text):
    selector, _, amount = text.rpartition("=")
    return Change(how, parse_selector(selector), float(amount) if how == "scale" else int(amount), f"--{how} {text}")


IDEAL = {name: Change("ideal", None, name, f"--ideal {name}") for name in ("comm", "balance")}


@pytest.mark.parametrize(
    "changes, after, nodes, critical",
    [
        ([change("delay", "1=7")], 45, 3, 2),  # on the critical path: exactly the delay
        ([change("delay", "0=7")], 38, 3, 0),  # as long as there is slack: nothing
        ([change("delay", "0=25")], 43, 3, 2),  # beyond the slack of 20: the rest
        ([change("delay", "rank=1 iteration=2=8")], 42, 1, 1),  # in one of the two that count
        ([change("delay", "at=train.py:5=4")], 42, 6, 2),
        ([change("scale", "op=all_reduce=0.5")], 35, 6, 2),  # 2.5 is 2
        ([change("scale", "0-1=2")], 71, 12, 2),
        ([change("set", "kind=compute at=train.py:5 rank=1=1")], 18, 3, 2),
        ([change("set", "op=all_reduce=0"), change("delay", "1=5")], 38, None, None),
        ([IDEAL["comm"]], 33, 6, 2),
        ([IDEAL["balance"]], 28, 18, 2),
        ([IDEAL["comm"], IDEAL["balance"]], 23, None, None),
    ],
)
def test_gains_by_hand(changes, after, nodes, critical):
    graph = example()
    planned, gain = plan(graph, changes)
    assert (gain.before, gain.after, gain.counted) == (38, after, 2)
    assert planned.timeline.iteration_time_ns == after and planned.stage == "calibrated"
    assert sum(part[1] for part in gain.parts) == after - 38 and [part[0] for part in gain.parts] == [
        c.text for c in changes
    ]
    if nodes is not None:
        assert gain.parts[0][2:] == (nodes, critical)
    assert graph.timeline.iteration_time_ns == 38, "the input is left alone"


def test_a_gain_shows_in_the_steady_state_and_the_sources():
    planned, _ = plan(example(), [change("delay", "1=7"), change("scale", "op=all_reduce iteration=1-2=2")])
    assert planned.steady.total_ns == 50
    source = [planned.durations.source[row].tolist() for row in planned.durations.row]
    assert np.flatnonzero(np.array(source[0]) == Source.PLANNED).tolist() == [5, 9]
    assert np.flatnonzero(np.array(source[1]) == Source.PLANNED).tolist() == [0, 4, 5, 8, 9]


def test_on_a_device_the_delay_is_on_the_stream():
    graph = example()
    graph.lanes = ["host", "stream 7"]
    program = graph.programs[0]
    program.columns["lane"] = np.array([0, 0, 1, 0] * 3, np.int16)
    planned, _ = plan(graph, [change("delay", "1=7")])
    assert planned.durations.own[planned.durations.row[1]].tolist() == [30, 5, 10, 0] * 3


def test_a_sandbox_keeps_its_own_work():
    planned, gain = plan(example(), [change("scale", "kind=compute=2"), change("set", "op=all_reduce=9")], real=[0])
    assert [planned.durations.own[row].tolist()[:4] for row in planned.durations.row] == [[10, 9, 3, 0], [60, 9, 6, 0]]
    with pytest.raises(PrismError, match=r"^--delay 0=7: ranks 0 run for real in this replay; select virtual ranks$"):
        plan(example(), [change("delay", "0=7")], real=[0])
    with pytest.raises(PrismError, match="run for real"):  # the whole group does
        plan(example(), [change("set", "op=all_reduce=9")], real=[0, 1])


def test_what_int64_does_not_hold_is_refused():
    """A span of 33 ns, a million times as long three times over."""
    steps = [change("scale", "kind=compute=1000000")] * 3
    planned, _ = plan(example(), steps[:2])
    assert planned.timeline.iteration_time_ns == 33 * 10**12 + 5
    with pytest.raises(PrismError, match="^--scale kind=compute=1000000: makes durations of 1,000,000,000 s and more"):
        plan(example(), steps)


def test_a_delay_needs_a_span():
    """The only one is before the iterations."""
    begin = [compute(), comm("barrier", "world", at="train.py:1 init")]
    graph = build(1, {"world": [0]}, lambda rank: begin + [comm("barrier", "world", at="train.py:2 go"), step()] * 2)
    graph = calibrated(graph, given_durations([[5, 1, 2, 0, 2, 0]]))
    with pytest.raises(PrismError, match="^--delay 0=7: no compute span in an iteration of these ranks; "):
        plan(graph, [change("delay", "0=7")])
    assert plan(graph, [change("delay", "kind=comm 0=7")])[1].after == 9


def test_without_iterations_the_whole_run_is_compared():
    graph = build(1, {"world": [0]}, lambda rank: [compute(), comm("barrier", "world"), compute()])
    _, gain = plan(calibrated(graph, given_durations([[10, 1, 2]])), [change("scale", "0=0.5")])
    assert (gain.before, gain.after, gain.counted, math.isnan(gain.half)) == (13, 7, 0, True)
    assert plan(graph, [change("delay", "0=5")])[1].after == 18, "once, at its beginning"


def backlog(first=100, then=10):
    """Rank 0 needs 20 ms for what it sends without waiting; rank 1 works on it for ``then``, in its first iteration for
    ``first``."""

    def nodes(rank):
        met = comm("recv", "world", 8, peer=0) if rank else comm("send", "world", 8, peer=1, is_async=True)
        return [compute(), met, compute(), step()] * 3

    graph = build(2, {"world": [0, 1]}, nodes)
    rows = [[20, 0, 0, 0] * 3, [0, 0, first, 0] + [0, 0, then, 0] * 2]
    graph.durations = given_durations([[round(ms * 10**6) for ms in row] for row in rows])
    return graph


def test_iterations_that_show_how_slow_the_warm_up_was_are_told_from_those_that_repeat():
    """Rank 1 has two inputs waiting when it comes to count: its iterations take 10 ms, those of rank 0 take 20. Ten times as
    fast it waits for its inputs, and takes (61 − 30) / 2: more. In the long run both take 20."""
    _, gain = plan(backlog(), [change("scale", "1=0.1")])
    assert (gain.before, gain.after, gain.lasting) == (15_000_000, 17_750_000, [20_000_000, 20_000_000])
    text = "  iterations that count also show how slow the warm-up was"
    assert gain_text(gain).splitlines()[2] == f"{text}; repeated for ever they take 20.00 → 20.00 ms (+0.00)"
    _, gain = plan(example(), [change("scale", "1=0.1")])
    assert gain.lasting is None and len(gain_text(gain).splitlines()) == 2


@pytest.mark.parametrize(
    "first, how, amount, before, after, odd",
    [
        (23, "scale", 0.9, 19.95, 19.95, False),
        # It begins to count at 31.5 instead of 43, and ends at 79.9 instead of 82.8.
        (23, "scale", 0.5, 19.95, 22.1, True),
        (11.5, "scale", 2, 22.1, 19.95, True),
        (11.5, "delay", 11_500_000, 22.1, 19.95, True),
    ],
)
def test_a_faster_warm_up_is_no_loss_and_a_slower_one_no_gain(first, how, amount, before, after, odd):
    _, gain = plan(backlog(first, 19.9), [change(how, f"1 kind=compute iteration=0 at=train.py:9={amount}")])
    assert (gain.before / 1e6, gain.after / 1e6, gain.lasting) == (before, after, [20e6, 20e6] if odd else None)


def test_the_half_width_is_of_what_differs():
    graph = example()
    assert plan(graph, [change("scale", "1=1")])[1].half == 0
    for row in graph.durations.spread:
        row[:] = 0
    graph.durations.spread[1][[4, 8]] = 6  # rank 1's first span, critical in both iterations
    graph.timeline.interval_ns = 0
    assert plan(graph, [change("scale", "1=0.5")])[1].half == pytest.approx(math.hypot(3, 3) / 2)
    assert plan(graph, [change("delay", "1=7")])[1].half == 0, "the span is as much in doubt before as after"
    graph.durations.bias[1][[4, 8]] = 6  # wrong by the same each time: adds up
    assert plan(graph, [change("scale", "1=0.5")])[1].half == pytest.approx(math.hypot(math.hypot(3, 3), 3 + 3) / 2)
    graph.timeline.interval_ns = 19  # half an iteration
    assert plan(graph, [change("delay", "1=8")])[1].half == 4


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32))
def test_equals_durations_edited_by_hand(seed):
    rng = random.Random(seed)
    graph = periodic_graph(rng, 3)
    matches = find_matches(graph)
    calibrated(graph, periodic_durations(rng, graph, matches))
    rank, factor, delay = rng.randrange(graph.world_size), rng.choice((0, 0.5, 3)), rng.randrange(1000)
    changes = [
        change("scale", f"kind=compute,wait rank={rank}={factor}"),
        change("set", f"kind=compute {rank}={delay}"),
    ]
    changes = rng.sample([*changes, change("delay", f"{rank}={delay}"), IDEAL["comm"], IDEAL["balance"]], 2)
    planned, _ = plan(graph, changes)
    own = [row.copy() for row in graph.durations.own]
    tail = [row.copy() for row in graph.durations.tail]
    kinds = [graph.program_of(r).kind for r in range(graph.world_size)]
    for made in changes:
        spans = kinds[rank] == Kind.COMPUTE
        if made.how == "scale":
            spans |= kinds[rank] == Kind.WAIT
            own[rank][spans] = np.rint(own[rank][spans] * factor)
        elif made.how == "set":
            own[rank][spans] = delay
        elif made.how == "delay":
            own[rank][:: len(own[rank]) // 3] += delay  # every iteration begins with a span
        elif made.amount == "comm":
            for r, kind in enumerate(kinds):
                own[r][kind == Kind.COMM], tail[r][kind == Kind.COMM] = 0, 0
        else:
            for program in range(len(graph.programs)):
                ranks = np.flatnonzero(graph.ranks.program == program)
                mean = np.rint(np.mean([own[r] for r in ranks], axis=0)).astype(np.int64)
                for r in ranks:
                    own[r] = np.where(kinds[r] == Kind.COMM, own[r], mean)
    wanted = solve(graph, matches, dependency_order(graph, matches), given_durations(own, tail))
    got = planned.timeline
    assert differences([got.start[row] for row in got.row], wanted[0]) == []
    assert differences([got.end[row] for row in got.row], wanted[1]) == []


def each_by_itself(graph):
    """``graph``, in which no two ranks share durations, so that they are looked at one by one."""
    known, every = graph.durations, np.arange(graph.world_size, dtype=np.int32)
    rows = {name: [getattr(known, name)[k] for k in known.row] for name in ("own", "tail", "spread", "bias", "source")}
    return replace(graph, durations=Durations(every, **rows))


def check_plan(graph, changes, real=()):
    """Planning with one rank of each class gives what planning rank by rank gives; returns both gains."""
    found = [plan(one, changes, real) for one in (graph, each_by_itself(graph))]
    (few, gain), (every, wanted) = found
    assert (gain.before, gain.after, gain.counted) == (wanted.before, wanted.after, wanted.counted)
    assert [part[:3] for part in gain.parts] == [part[:3] for part in wanted.parts]
    for rank in range(graph.world_size):
        for part, names in (("durations", ("own", "tail", "spread", "bias", "source")), ("timeline", ("start", "end"))):
            a, b = getattr(few, part), getattr(every, part)
            assert all(np.array_equal(getattr(a, name)[a.row[rank]], getattr(b, name)[b.row[rank]]) for name in names)
    assert (few.steady and few.steady.total_ns) == (every.steady and every.steady.total_ns)
    return gain, wanted


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32))
def test_classes_gain_what_ranks_gain(seed):
    rng = random.Random(seed)
    graph, count = random_replicas(rng)
    calibrated(graph, copied_durations(rng, graph, np.arange(graph.world_size) % count))
    ranks, groups = range(graph.world_size), graph.groups.name
    some = ",".join(map(str, rng.sample(ranks, rng.randint(1, min(3, len(ranks))))))
    changes = [
        change("delay", f"{some}=77"),
        change("scale", f"kind=comm,compute group={rng.choice(groups)}=2"),
        change("scale", f"kind=compute,comm rank={some} iteration=0=3"),
        change("set", f"kind=comm rank={rng.choice(ranks)}=5"),
        *IDEAL.values(),
    ]
    real = rng.sample(ranks, rng.randint(0, len(ranks) - 1)) if rng.random() < 0.5 else ()
    for chosen in (rng.sample(changes, 2), [rng.choice(changes)]):
        try:
            plan(each_by_itself(graph), chosen, real)
        except PrismError as error:
            with pytest.raises(PrismError, match=f"^{re.escape(str(error))}$"):
                plan(graph, chosen, real)
        else:
            check_plan(graph, chosen, real)


@pytest.mark.parametrize("slow", [(), (5,)])
def test_a_delay_on_one_of_many_ranks_makes_few_classes(slow):
    cluster = clusters.Cluster(tp=2, pp=3, dp=8, ep=2, iterations=3)
    graph = clusters.build(cluster)
    row = graph.ranks.program * cluster.tp + np.arange(graph.world_size) % cluster.tp
    calibrated(graph, clusters.durations(graph, row, slow=slow))
    for changes in (
        [change("delay", "7=500000")],
        [change("scale", "op=all_reduce group=tp*=0.5"), change("delay", "rank=3 op=all_to_all=9000")],
        [change("scale", "group=dp1,tp3 op=*=3"), IDEAL["balance"]],
    ):
        gain, wanted = check_plan(graph, changes)
        assert gain == wanted
    planner = Planner(graph, told_apart(graph, parse_selector("7")))
    assert len(planner.matches.classes) < graph.world_size // 2 * (1 + bool(slow))
