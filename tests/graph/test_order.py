"""Dependency order: every step after what it needs, the same each time, and cycles named."""

import numpy as np
import pytest

from prism_tools.errors import PrismError
from prism_tools.graph.match import find_matches
from prism_tools.graph.order import dependency_order
from tests.graph.builder import build, comm, compute, step, train4, wait


def order_of(graph):
    return dependency_order(graph, find_matches(graph))


def test_steps_come_after_what_they_need():
    graph = train4()
    matches = find_matches(graph)
    order = dependency_order(graph, matches)
    total = int(matches.base[-1])
    assert sorted(order.steps) == list(range(-len(order.releases), total))
    arrived, ended = set(), set()
    for done in order.steps.tolist():
        if done < 0:
            arrivals, leavers = order.releases[-done - 1]
            assert arrived.issuperset(arrivals)
            ended.update(leavers)
            continue
        assert ended.issuperset(order.preds[done].tolist())
        arrived.add(done)
        if matches.of_node[done] < 0:
            ended.add(done)
    assert len(ended) == total
    assert dependency_order(train4(), matches).steps.tolist() == order.steps.tolist()


def test_predecessors_are_the_queue_and_the_edges():
    nodes = [
        compute(),
        comm("all_reduce", "w", 4, is_async=True, name="a"),
        comm("barrier", "w", is_async=True, name="b"),
    ]
    nodes += [compute(), wait("a", "b"), step()]
    order = order_of(build(2, {"w": [0, 1]}, lambda rank: nodes))
    # Gloo's lane is no queue: node 2 does not wait for node 1. The host goes on from 0 to 3.
    expected = [[], [0], [0], [0], [3, 1, 2], [4]]
    assert [order.preds[n].tolist() for n in range(6)] == expected
    assert [order.preds[n].tolist() for n in range(6, 12)] == [[p + 6 for p in row] for row in expected]


def test_backend_streams_are_queues():
    nodes = [compute(), comm("all_reduce", "w", 4, is_async=True), comm("barrier", "w", is_async=True)]
    order = order_of(build(1, {"w": [0]}, lambda rank: nodes, backend="nccl"))
    assert [order.preds[n].tolist() for n in range(3)] == [[], [0], [1, 0]]


def test_an_edge_that_says_what_the_lane_implies_counts_once():
    graph = build(1, {}, lambda rank: [compute(), compute(), step()])
    graph.programs[0].edges = np.array([[0, 1], [0, 2], [0, 2], [1, 2]], np.int32)
    order = order_of(graph)
    assert [order.preds[n].tolist() for n in range(3)] == [[], [0], [1, 0]]
    assert order.steps.tolist() == [0, 1, 2]


def test_two_ranks_have_a_known_order():
    graph = build(2, {"w": [0, 1]}, lambda rank: [compute(), comm("barrier", "w"), compute()])
    assert order_of(graph).steps.tolist() == [0, 1, 3, 4, -1, 5, 2]


def test_cycle_names_who_waits_for_whom():
    def nodes(rank):
        order = ["w", "v"] if rank == 0 else ["v", "w"]
        return [compute()] + [comm("barrier", group, at=f"a.py:{rank} f") for group in order]

    with pytest.raises(PrismError) as caught:
        order_of(build(2, {"w": [0, 1], "v": [0, 1]}, nodes))
    assert str(caught.value).startswith(
        "operations wait for each other: rank 0 barrier on w (a.py:0 f) waits for rank 1; "
        "rank 1 barrier on v (a.py:1 f) waits for rank 0; "
    )


def test_long_cycle_is_a_line_and_a_table():
    def nodes(rank):
        return [comm("send", "w", 4, peer=(rank + 1) % 5), comm("recv", "w", peer=(rank - 1) % 5)]

    with pytest.raises(PrismError, match=r"rank 1 send on w .* waits for rank 2 \(and 3 more\); ") as caught:
        order_of(build(5, {"w": [0, 1, 2, 3, 4]}, nodes))
    assert [line.split(" (")[0] for line in caught.value.detail.splitlines()] == [
        f"rank {r} send on w" for r in (2, 3, 4)
    ]


def test_who_waits_for_a_circle_is_no_part_of_it():
    """Ranks 2 and 3 send to each other; ranks 0 and 1 wait for them, and stand before them."""

    def nodes(rank):
        ring = [comm("send", "w", 4, peer=5 - rank), compute(), comm("recv", "w", peer=5 - rank)] if rank > 1 else []
        return [compute(), *ring, comm("barrier", "w")]

    graph = build(4, {"w": [0, 1, 2, 3]}, nodes)
    with pytest.raises(PrismError) as caught:
        order_of(graph)
    told = ["rank 2 send on w", "rank 3 send on w", "rank 0 barrier on w", "rank 1 barrier on w"]
    lines = [*str(caught.value).split(": ", 1)[1].split("; ")[:2], *caught.value.detail.splitlines()]
    assert [line.split(" (")[0] for line in lines] == told
    assert [line.rsplit(" ", 4)[1:] for line in lines[2:]] == [["waits", "for", "rank", "2"]] * 2


def test_edges_in_a_circle_are_named_although_others_wait_for_them():
    graph = build(2, {"w": [0, 1]}, lambda rank: [*[compute()] * (1 + rank), comm("barrier", "w")])
    graph.programs[1].edges = np.array([[1, 0]], np.int32)
    with pytest.raises(PrismError, match=r": rank 1 compute \(node 0\); rank 1 compute \(node 1\) \(and 1 more\); "):
        order_of(graph)


def test_edges_in_a_circle_need_no_communication():
    graph = build(1, {}, lambda rank: [compute(), compute(), compute()])
    graph.programs[0].edges = np.array([[2, 1]], np.int32)
    with pytest.raises(PrismError, match=r": rank 0 compute \(node 1\); rank 0 compute \(node 2\); the program"):
        order_of(graph)


def test_empty_graph_has_an_empty_order():
    order = order_of(build(1, {}, lambda rank: []))
    assert (len(order.steps), len(order.preds)) == (0, 0)


def test_long_programs_need_no_recursion():
    graph = build(2, {"w": [0, 1]}, lambda rank: [compute(), comm("barrier", "w")] * 3000)
    assert len(order_of(graph).steps) == 2 * 6000 + 3000


def test_the_operations_of_a_batch_run_together_on_a_queue():
    """Rank 0's batch sends to 1 and receives from 1; were it a queue, the pairs would wait for each other."""
    pair = [0, 1]
    steps = {
        0: [("send", 1), ("recv", 1)],
        1: [("send", 0), ("recv", 0)],
    }
    graph = build(
        2,
        {"world": pair},
        lambda rank: [
            compute(),
            *(comm(op, "world", 8, peer=peer, is_async=True, name=op, batch=0) for op, peer in steps[rank]),
            comm("all_reduce", "world", 8, is_async=True, name="after"),
            wait("after"),
        ],
    )
    graph.lanes[1] = "nccl 0"
    order = dependency_order(graph, find_matches(graph))
    preds = [sorted(order.preds[node].tolist()) for node in range(len(graph.program_of(0)))]
    assert preds == [[], [0], [0], [0, 1, 2], [0, 3]]
