"""Matching: known pairs on small graphs, and every way in which they can fail to pair."""

import numpy as np
import pytest

from prism_tools.errors import PrismError
from prism_tools.graph.match import Matches, find_matches
from prism_tools.graph.model import Ragged
from prism_tools.graph.schema import Match, Op
from prism_tools.graph.semantics import EAGER_BYTES
from tests.graph.builder import build, comm, compute, step, train4

BACKENDS = ("nccl", "gloo")


def members(matches: Matches) -> list[list[tuple[int, int]]]:
    """Each match's members as (rank, node)."""
    return [
        [(matches.rank_of(f), matches.node_of(f)) for f in row]
        for row in map(matches.members.__getitem__, range(len(matches)))
    ]


def test_collectives_match_by_group_and_order():
    graph = build(
        4,
        {"all": [0, 1, 2, 3], "odd": [3, 1]},
        lambda rank: [compute()] + [comm("all_reduce", "odd")] * 2 * (rank % 2) + [comm("barrier", "all")],
    )
    matches = find_matches(graph)
    assert members(matches) == [
        [(0, 1), (1, 3), (2, 1), (3, 3)],
        [(3, 1), (1, 1)],  # in group-rank order
        [(3, 2), (1, 2)],
    ]
    assert matches.group.tolist() == [0, 1, 1]
    assert matches.op.tolist() == [Op.BARRIER, Op.ALL_REDUCE, Op.ALL_REDUCE]
    assert matches.base.tolist() == [0, 2, 6, 8, 12]
    assert matches.of_node.tolist() == [-1, 0, -1, 1, 2, 0, -1, 0, -1, 1, 2, 0]
    assert (matches.base.dtype, matches.of_node.dtype, matches.members.data.dtype) == (np.int64, np.int32, np.int64)
    assert (matches.group.dtype, matches.kind.dtype, matches.op.dtype) == (np.int32, np.uint8, np.uint8)


def test_pairs_are_first_in_first_out_per_tag_and_direction():
    def nodes(rank):
        peer = 1 - rank
        if rank == 0:
            return [
                comm("send", "w", 4, peer=peer, tag=1),
                comm("recv", "w", peer=peer),
                comm("send", "w", 4, peer=peer, tag=2),
                comm("send", "w", 4, peer=peer, tag=1),
            ]
        return [
            comm("recv", "w", peer=peer, tag=2),
            comm("recv", "w", peer=peer, tag=1),
            comm("send", "w", 4, peer=peer),
            comm("recv", "w", peer=peer, tag=1),
        ]

    groups = {"w": [1, 0]}
    matches = find_matches(build(2, groups, nodes))
    pairs = [[(1, 2), (0, 1)], [(0, 0), (1, 1)], [(0, 3), (1, 3)], [(0, 2), (1, 0)]]  # sender first
    assert sorted(members(matches)) == sorted(pairs)
    assert set(matches.kind.tolist()) == {Match.PAIR}
    blind = sorted(members(find_matches(build(2, groups, nodes, backend="nccl"))))
    assert blind == [[(0, 0), (1, 0)], [(0, 2), (1, 1)], [(0, 3), (1, 3)], [(1, 2), (0, 1)]]


def test_p2p_and_collectives_of_one_group_are_counted_apart():
    graph = build(
        3,
        {"w": [0, 1, 2]},
        lambda rank: (
            [comm("send", "w", 4, peer=1)] * (rank == 0)
            + [comm("barrier", "w")]
            + [comm("recv", "w", peer=0)] * (rank == 1)
        ),
    )
    assert members(find_matches(graph)) == [[(0, 1), (1, 0), (2, 0)], [(0, 0), (1, 1)]]


@pytest.mark.parametrize(
    ("backend", "special"),
    [
        ("gloo", {"broadcast": "TREE", "scatter": "ROOTED", "gather": "ROOTED"}),
        ("nccl", {"broadcast": "ROOT_FIRST", "scatter": "ROOT_FIRST", "reduce": "ROOT_LAST", "gather": "ROOT_LAST"}),
    ],
)
def test_kinds_follow_backend_and_operation(backend, special):
    ops = "all_reduce broadcast reduce all_gather reduce_scatter all_to_all gather scatter barrier".split()
    graph = build(2, {"w": [0, 1]}, lambda rank: [comm(op, "w", 4, root=0) for op in ops], backend=backend)
    matches = find_matches(graph)
    kinds = {Op(op).name.lower(): Match(kind).name for op, kind in zip(matches.op, matches.kind, strict=True)}
    assert kinds == dict.fromkeys(ops, "COLLECTIVE") | special


def test_train4_has_the_matches_it_was_written_with():
    matches = find_matches(train4())
    names, counts = np.unique(matches.op, return_counts=True)
    assert dict(zip(names.tolist(), counts.tolist(), strict=True)) == {
        Op.ALL_REDUCE: 8, Op.BROADCAST: 1, Op.ALL_TO_ALL: 4, Op.BARRIER: 1, Op.SEND: 8,
    }  # fmt: skip
    assert [len(row) for row in members(matches)].count(4) == 2


def test_graphs_without_communication_have_no_matches():
    for graph in (build(2, {"w": [0, 1]}, lambda rank: [compute(), step()]), build(1, {}, lambda rank: [])):
        matches = find_matches(graph)
        assert (len(matches), matches.problems, set(matches.of_node.tolist()) - {-1}) == (0, [], set())


def check_problem(graph, problem: str, rows: list) -> None:
    with pytest.raises(PrismError) as caught:
        find_matches(graph)
    assert str(caught.value).startswith(problem) and "\n" not in str(caught.value)
    matches = find_matches(graph, strict=False)
    assert matches.problems[0] == problem and members(matches) == rows


def test_missing_members_are_named():
    graph = build(
        4,
        {"w": [0, 1, 2, 3]},
        lambda rank: [comm("barrier", "w")] + [comm("reduce", "w", 4, root=0, at="a.py:3 f")] * (rank == 1),
    )
    problem = "rank 1 reduce on w, node 1 (a.py:3 f): no counterpart on ranks 0,2-3"
    check_problem(graph, problem, [[(0, 0), (1, 0), (2, 0), (3, 0)], [(1, 1)]])


def test_different_operations_are_named():
    ops = ("all_reduce", "barrier")
    graph = build(2, {"w": [0, 1]}, lambda rank: [comm(ops[rank], "w", at=f"a.py:{rank} f")])
    problem = (
        "rank 0 all_reduce on w, node 0 (a.py:0 f): "
        "but rank 1 barrier on w, node 0 (a.py:1 f) is the same operation in order"
    )
    check_problem(graph, problem, [[(0, 0), (1, 0)]])


@pytest.mark.parametrize("op", ["send", "recv"])
def test_lonely_pairs_are_named(op):
    graph = build(2, {"w": [0, 1]}, lambda rank: [comm(op, "w", 4, peer=1, at="a.py:1 f")] if rank == 0 else [])
    towards, other = ("to", "receive") if op == "send" else ("from", "send")
    check_problem(
        graph, f"rank 0 {op} {towards} rank 1 on w, node 0 (a.py:1 f): rank 1 has no {other} for it", [[(0, 0)]]
    )


def test_unknown_peer_and_strangers_are_named():
    graph = build(2, {"w": [0, 1]}, lambda rank: [comm("recv", "w", at="")] if rank == 0 else [])
    check_problem(graph, "rank 0 recv on w, node 0: the peer is unknown", [])
    graph = build(2, {"w": [0, 1]}, lambda rank: [comm("barrier", "w", at="")])
    graph.groups.members = Ragged.from_rows([[0]], np.int32)
    check_problem(graph, "rank 1 barrier on w, node 0: the rank is no member of this group", [[(0, 0)]])


def test_many_problems_are_one_line_and_a_table():
    graph = build(2, {"w": [0, 1]}, lambda rank: [comm("barrier", "w")] * (30 * rank))
    with pytest.raises(PrismError, match=r"no counterpart on ranks 0 \(and 29 more problems\); ") as caught:
        find_matches(graph)
    assert len(caught.value.detail.splitlines()) == 19
    assert len(find_matches(graph, strict=False).problems) == 30


def test_small_sends_of_nccl_do_not_wait_for_their_receiver():
    def nodes(rank):
        peer, op = 1 - rank, ("recv", "send")[rank]
        return [comm(op, "w", size, peer=peer) for size in (4, EAGER_BYTES["nccl"], EAGER_BYTES["nccl"] + 1)]

    kinds = {
        backend: find_matches(build(2, {"w": [0, 1]}, nodes, backend=backend)).kind.tolist() for backend in BACKENDS
    }
    assert kinds == {"nccl": [Match.EAGER, Match.EAGER, Match.PAIR], "gloo": [Match.PAIR] * 3}


def test_a_group_in_two_slots_of_a_rank_is_one():
    """Its collectives and sends count together, in program order, whichever slot they are called in."""
    ops = [comm("barrier", "w"), comm("send", "w", 4, peer=0), comm("barrier", "w"), comm("send", "w", 4, peer=0)]
    graph = build(2, {"w": [0, 1]}, lambda rank: ops if rank else [comm("recv", "w", peer=1)] * 2 + ops[::2])
    graph.ranks.slots = Ragged.from_rows([[0, 0]] * 2, np.int32)
    graph.program_of(1).slot[1:3] = 1
    assert members(find_matches(graph)) == [[(0, 2), (1, 0)], [(0, 3), (1, 2)], [(1, 1), (0, 0)], [(1, 3), (0, 1)]]


def test_ranks_of_one_program_may_talk_by_backends_with_and_without_tags():
    def nodes(rank):
        order = (1, 2) if rank < 2 else (2, 1)
        return [
            comm("recv" if rank > 1 else "send", "w" if rank % 2 else "v", 4, peer=(rank + 2) % 4, tag=t) for t in order
        ]

    graph = build(4, {"v": [0, 2], "w": [1, 3]}, nodes)
    assert len(graph.programs) == 2 and graph.ranks.program.tolist() == [0, 0, 1, 1]
    graph.groups.backend[0] = "nccl"
    assert members(find_matches(graph)) == [[(0, 0), (2, 0)], [(0, 1), (2, 1)], [(1, 0), (3, 1)], [(1, 1), (3, 0)]]


def test_two_groups_of_a_class_have_their_members_in_program_order():
    """The groups a = [0] and b = [0] are of one class: each match has both nodes of rank 0, the earlier one first."""
    graph = build(1, {"a": [0], "b": [0]}, lambda rank: [comm("barrier", group) for group in "abba"])
    matches = find_matches(graph)
    assert members(matches) == [[(0, 0)], [(0, 3)], [(0, 1)], [(0, 2)]]
    matches.classes.of_group[:] = 0
    together = find_matches(graph, strict=False, classes=matches.classes)
    assert members(together) == [[(0, 0), (0, 1)], [(0, 2), (0, 3)]] and together.group.tolist() == [0, 1]
