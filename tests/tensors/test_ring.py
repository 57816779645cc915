"""In order "ring" the executor gives the bits of real gloo, for vectors of every size, type and number of members."""

import pytest
import torch

from prism_tools.graph.schema import Op, Reduce, ReduceOrder
from prism_tools.tensors import ring
from prism_tools.tensors.executor import execute
from tests.programs.float_sums import TYPES, complexes, digest, long_size, specials, values
from tests.tools import said

RING = ReduceOrder.RING


def expected_lines(world):
    """What tests/programs/float_sums.py prints, from the executor."""
    lines = []

    def add(name, outs, ranks=range(world)):
        lines.extend(f"check rank {rank} {name} {digest(outs[rank])}" for rank in ranks)

    for dtype, sizes in TYPES.items():
        for size in sizes:
            name = f"{size} {dtype}"
            ins = [[values(rank, size, dtype)] for rank in range(world)]
            for kind in (Reduce.SUM, Reduce.AVG, Reduce.PRODUCT):
                add(f"all_reduce {kind.name} {name}", execute(Op.ALL_REDUCE, ins, kind, -1, order=RING))
            add(f"reduce {name}", execute(Op.REDUCE, ins, Reduce.SUM, world - 1, order=RING), [world - 1])
            ins = [list(values(rank, size * world, dtype).chunk(world)) for rank in range(world)]
            for method, whole in (("reduce_scatter_tensor", True), ("reduce_scatter", False)):
                outs = execute(Op.REDUCE_SCATTER, ins, Reduce.SUM, -1, order=RING, whole=whole)
                add(f"{method} {name}", outs)
        ins = [[values(rank, size, dtype) for size in sizes] for rank in range(world)]
        add(f"all_reduce_coalesced {dtype}", execute(Op.ALL_REDUCE, ins, Reduce.SUM, -1, order=RING))
    for kind in (Reduce.MIN, Reduce.MAX):
        ins = [[specials(rank)] for rank in range(world)]
        add(f"all_reduce {kind.name} special", execute(Op.ALL_REDUCE, ins, kind, -1, order=RING))
    for name, kind in (("", Reduce.SUM), (" AVG", Reduce.AVG)):
        ins = [list(complexes(rank, 7 * world).chunk(world)) for rank in range(world)]
        outs = execute(Op.REDUCE_SCATTER, ins, kind, -1, order=RING, whole=True)
        add(f"reduce_scatter_tensor{name} complex", [[torch.view_as_real(out) for out in mine] for mine in outs])
        ins = [[complexes(rank, 7 * world)] for rank in range(world)]
        for op, ranks in ((Op.ALL_REDUCE, range(world)), (Op.REDUCE, [0])):
            outs = execute(op, ins, kind, 0, order=RING)
            reals = [[torch.view_as_real(out) for out in mine] for mine in outs]
            add(f"{op.name.lower()} {kind.name} complex", reals, ranks)
    ins = [[values(rank, long_size(world), torch.float32)] for rank in range(world)]
    add("all_reduce long", execute(Op.ALL_REDUCE, ins, Reduce.SUM, -1, order=RING))
    add("reduce long", execute(Op.REDUCE, ins, Reduce.SUM, 0, order=RING), [0])
    return sorted(lines)


@pytest.mark.parametrize("world", [2, 3, 4, 5, 8])
def test_bits_of_real_gloo(world, real):
    found = said(real.output("float_sums.py", world=world), "check")
    assert found == expected_lines(world)


def test_chunks_of_known_sizes():
    """From gloo's sources by hand: two segments a member at least, of whole elements, of 1 MiB at most."""
    assert ring.all_reduce_chunk(1, 4, 4) == ring.reduce_chunk(1, 4, 4) == 2  # one element a segment
    assert ring.all_reduce_chunk(1000, 4, 4) == ring.reduce_chunk(1000, 4, 4) == 250
    assert ring.all_reduce_chunk(1001, 4, 4) == ring.reduce_chunk(1001, 4, 4) == 252
    # 5 MiB and one element among two: 6 segments of even length; or 6 of 1 MiB each
    assert ring.all_reduce_chunk(5 * 2**18 + 1, 4, 2) == 3 * 218454
    assert ring.reduce_chunk(5 * 2**18 + 1, 4, 2) == 3 * 2**18


def test_each_chunk_begins_at_its_own_member():
    """1e8 swallows a 1.0 added to it in float32: the order shows in the sums."""
    parts = [torch.full((6,), value) for value in (1e8, 1.0, 1.0, -1e8)]
    # by chunk of two elements: members 3 2 1 0, then 0 3 2 1, 1 0 3 2; chunk 3 would begin at member 2
    total = ring.fold(parts, Reduce.SUM, 2)
    by_hand = []
    for order in ((3, 2, 1, 0), (0, 3, 2, 1), (1, 0, 3, 2)):
        acc = parts[order[0]][0]
        for member in order[1:]:
            acc = parts[member][0] + acc
        by_hand += [acc.item()] * 2
    assert total.tolist() == by_hand == [0.0, 0.0, 2.0, 2.0, 1.0, 1.0]


@pytest.mark.parametrize("kind", [Reduce.SUM, Reduce.BAND, Reduce.MAX])
def test_integers_do_not_care(kind):
    ins = [[torch.arange(7) * (member + 1)] for member in range(5)]
    by_rank, by_ring = (execute(Op.ALL_REDUCE, ins, kind, -1, order=order)[3] for order in ReduceOrder)
    assert torch.equal(by_rank[0], by_ring[0])


def test_contributions_stay_and_a_factor_counts():
    ins = [[torch.tensor([1.0, 2.0, 3.0])] for _ in range(3)]
    assert execute(Op.ALL_REDUCE, ins, Reduce.PREMUL_SUM, -1, 0.5, RING)[1][0].tolist() == [1.5, 3.0, 4.5]
    assert all(mine[0].tolist() == [1.0, 2.0, 3.0] for mine in ins)


def test_sparse_sums_have_no_ring():
    """Values and places, of two types: rank by rank, as without a ring."""
    ins = [[torch.tensor([1e8, value]), torch.tensor([1, 0], dtype=torch.int32)] for value in (1.0, 2.0, 3.0, -1e8)]
    totals = execute(Op.ALL_REDUCE, ins, Reduce.SUM, -1, 1.0, RING)[0]
    assert [total.dtype for total in totals] == [torch.float32, torch.int32]
    assert [total.tolist() for total in totals] == [[4e8, -99999992.0], [4, 0]]  # floats near 1e8 are 8 apart
