"""Each operation's results against NumPy, each reduction and type against a fold."""

import functools

import numpy as np
import pytest
import torch

from prism_tools.graph.schema import Op, Reduce
from prism_tools.tensors.executor import execute, fold, unpack

MEMBERS = 3
FOLDS = {
    Reduce.SUM: np.add,
    Reduce.PRODUCT: np.multiply,
    Reduce.MIN: np.minimum,
    Reduce.MAX: np.maximum,
    Reduce.BAND: np.bitwise_and,
    Reduce.BOR: np.bitwise_or,
    Reduce.BXOR: np.bitwise_xor,
}
FLOATS = ("float32", "float64")
INTEGERS = ("int64", "int32", "int16", "int8", "uint8")


def contributions(dtype, count=5, tensors=1):
    """Per member a list of ``tensors`` tensors, different everywhere."""
    generator = np.random.default_rng(7)
    if dtype in INTEGERS:
        return [
            [torch.from_numpy(generator.integers(1, 5, count).astype(dtype)) for _ in range(tensors)]
            for _ in range(MEMBERS)
        ]
    return [
        [torch.from_numpy(generator.normal(size=count).astype(dtype)) for _ in range(tensors)] for _ in range(MEMBERS)
    ]


def folded(kind, tensors):
    return functools.reduce(FOLDS[kind], [tensor.numpy() for tensor in tensors])


def same(found, expected):
    """Equal type, shape and bits; ``expected``: arrays or tensors."""
    assert len(found) == len(expected)
    for tensor, array in zip(found, expected, strict=True):
        array = array.numpy() if isinstance(array, torch.Tensor) else array
        assert tensor.numpy().dtype == array.dtype
        np.testing.assert_array_equal(tensor.numpy(), array)


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS)
@pytest.mark.parametrize("kind", [Reduce.SUM, Reduce.PRODUCT, Reduce.MIN, Reduce.MAX])
def test_reductions_fold_in_rank_order(kind, dtype):
    ins = contributions(dtype)
    for outs in execute(Op.ALL_REDUCE, ins, kind, -1):
        same(outs, [folded(kind, [mine[0] for mine in ins])])


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("kind", [Reduce.BAND, Reduce.BOR, Reduce.BXOR])
def test_bits(kind, dtype):
    ins = contributions(dtype)
    same(execute(Op.ALL_REDUCE, ins, kind, -1)[2], [folded(kind, [mine[0] for mine in ins])])


@pytest.mark.parametrize("kind", [Reduce.SUM, Reduce.MAX, Reduce.BOR, Reduce.BAND, Reduce.MIN])
def test_bools(kind):
    ins = [
        [torch.tensor([False, False, True])],
        [torch.tensor([False, True, True])],
        [torch.tensor([False, True, True])],
    ]
    union = kind in (Reduce.SUM, Reduce.MAX, Reduce.BOR)
    same(execute(Op.ALL_REDUCE, ins, kind, -1)[0], [np.array([False, union, True])])


def test_average():
    floats = [[torch.tensor([1.0, 2.0])], [torch.tensor([2.0, 2.5])], [torch.tensor([4.0, 3.5])]]
    third = np.float32(3)
    same(execute(Op.ALL_REDUCE, floats, Reduce.AVG, -1)[1], [np.array([7, 8], np.float32) / third])
    integers = [[torch.tensor([1, 2, -1])], [torch.tensor([2, 2, -2])], [torch.tensor([4, 5, -4])]]
    same(execute(Op.ALL_REDUCE, integers, Reduce.AVG, -1)[0], [np.array([2, 3, -2])])  # NCCL divides as C does


def test_multiplied_sum():
    ins = [[torch.tensor([1.0])], [torch.tensor([2.0])], [torch.tensor([4.0])]]
    same(execute(Op.ALL_REDUCE, ins, Reduce.PREMUL_SUM, -1, 0.5)[0], [np.array([3.5], np.float32)])


@pytest.mark.parametrize("op", [Op.ALL_REDUCE, Op.REDUCE_SCATTER])
@pytest.mark.parametrize("kind", [Reduce.SUM, Reduce.AVG, Reduce.PREMUL_SUM])
@pytest.mark.parametrize("dtype", [np.complex64, np.complex128, np.float64, np.float16])
def test_what_gloo_refuses_is_numpys_fold(op, kind, dtype):
    """Averages of complex numbers and multiplied sums, as NCCL has them; eighths, so that no type rounds."""
    values = (np.arange(24).reshape(3, 2, 4) / 8).astype(dtype) * dtype(
        1 if dtype in (np.float64, np.float16) else 1 + 2j
    )
    ins = [[torch.from_numpy(part.copy()) for part in (mine[:1] if op is Op.ALL_REDUCE else mine)] for mine in values]
    if op is Op.REDUCE_SCATTER:
        ins = [[*mine, torch.from_numpy(np.zeros(4, dtype))] for mine in ins]
    total = values.sum(0) * {Reduce.SUM: 1, Reduce.AVG: 1 / 3, Reduce.PREMUL_SUM: 0.5}[kind]
    out = execute(op, ins, kind, -1, 0.5)[0]
    assert out[0].numpy().dtype == dtype
    np.testing.assert_allclose(out[0].numpy(), total[0].astype(dtype), rtol=0 if kind is not Reduce.AVG else 1e-3)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_eight_bit_floats(dtype):
    """As NCCL adds them; values that the type holds."""
    ins = [[torch.tensor([1.0, 2.0, -4.0]).to(dtype)], [torch.tensor([3.0, 0.5, 4.0]).to(dtype)]]
    for kind, expected in (
        (Reduce.SUM, [4.0, 2.5, 0.0]),
        (Reduce.MAX, [3.0, 2.0, 4.0]),
        (Reduce.AVG, [2.0, 1.25, 0.0]),
    ):
        out = execute(Op.ALL_REDUCE, ins, kind, -1)[1][0]
        assert (out.dtype, out.float().tolist()) == (dtype, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_floats_are_summed_wide_and_rounded_once(dtype):
    """256 + 0.75 + 0.75 in bfloat16 is 256 where each sum is rounded, 258 where only the last one is."""
    small = {torch.bfloat16: (256.0, 0.75), torch.float16: (2048.0, 0.75)}[dtype]
    parts = [torch.tensor([small[0], 1.5], dtype=dtype)] + [torch.tensor([small[1], 0.25], dtype=dtype)] * 2
    step = (parts[0] + parts[1]) + parts[2]
    total = fold(parts, Reduce.SUM)
    assert total.dtype == dtype
    assert total.tolist() == [small[0] + 2, 2.0] and step.tolist()[0] == small[0]
    assert fold(parts, Reduce.AVG).tolist() == torch.tensor([(small[0] + 1.5) / 3, 2 / 3]).to(dtype).tolist()


def test_two_addends_do_not_depend_on_their_order():
    a, b = (torch.randn(1000, dtype=torch.float32) for _ in range(2))
    assert torch.equal(fold([a, b], Reduce.SUM), fold([b, a], Reduce.SUM))


def test_a_fold_leaves_the_contributions_alone():
    ins = contributions("float32")
    before = [mine[0].clone() for mine in ins]
    for kind in (Reduce.SUM, Reduce.AVG, Reduce.PREMUL_SUM):
        execute(Op.ALL_REDUCE, ins, kind, -1, 2.0)
    assert all(torch.equal(mine[0], old) for mine, old in zip(ins, before, strict=True))


def test_coalesced_tensors_are_reduced_one_by_one():
    ins = contributions("float32", tensors=2)
    same(
        execute(Op.ALL_REDUCE, ins, Reduce.SUM, -1)[0], [folded(Reduce.SUM, [mine[t] for mine in ins]) for t in (0, 1)]
    )


def test_reduce_gives_to_the_root_alone():
    ins = contributions("float32")
    outs = execute(Op.REDUCE, ins, Reduce.SUM, 1)
    assert outs[0] == outs[2] == []
    same(outs[1], [folded(Reduce.SUM, [mine[0] for mine in ins])])


def test_broadcast_gives_to_all_but_the_root():
    value = torch.arange(4)
    outs = execute(Op.BROADCAST, [[], [], [value]], Reduce.NONE, 2)
    same(outs[0], [value])
    same(outs[1], [value])
    assert outs[2] == []


def test_all_gather_is_tensor_major():
    ins = contributions("int32", tensors=2)
    expected = [ins[member][t] for t in (0, 1) for member in range(MEMBERS)]
    for outs in execute(Op.ALL_GATHER, ins, Reduce.NONE, -1):
        same(outs, expected)


def test_reduce_scatter_of_two_tensors():
    """ins[t * K + i] of every member are summed into tensor t of member i."""
    ins = contributions("float64", tensors=2 * MEMBERS)
    for i, outs in enumerate(execute(Op.REDUCE_SCATTER, ins, Reduce.SUM, -1)):
        same(outs, [folded(Reduce.SUM, [mine[t * MEMBERS + i] for mine in ins]) for t in (0, 1)])


def test_all_to_all_transposes_uneven_pieces():
    ins = [
        [torch.full((sender + receiver,), 10 * sender + receiver) for receiver in range(MEMBERS)]
        for sender in range(MEMBERS)
    ]
    for receiver, outs in enumerate(execute(Op.ALL_TO_ALL, ins, Reduce.NONE, -1)):
        same(outs, [np.full(sender + receiver, 10 * sender + receiver) for sender in range(MEMBERS)])


def test_gather_and_scatter():
    ins = contributions("int64")
    outs = execute(Op.GATHER, ins, Reduce.NONE, 0)
    same(outs[0], [mine[0] for mine in ins])
    assert outs[1:] == [[], []]
    pieces = contributions("int64", tensors=MEMBERS)[0]
    for member, out in enumerate(execute(Op.SCATTER, [[], pieces, []], Reduce.NONE, 1)):
        same(out, [pieces[member]])


def test_barrier_and_point_to_point():
    assert execute(Op.BARRIER, [[], []], Reduce.NONE, -1) == [[], []]
    with pytest.raises(ValueError, match="SEND is not a collective"):
        execute(Op.SEND, [[]], Reduce.NONE, -1)


def test_unpack_views_the_payload():
    payload = memoryview(bytearray(np.array([1.5, 2.5], np.float32).tobytes() + np.array([7], np.int64).tobytes()))
    first, empty, last = unpack([("float32", 2), ("bfloat16", 0), ("int64", 1)], payload)
    same([first, last], [np.array([1.5, 2.5], np.float32), np.array([7])])
    assert empty.dtype == torch.bfloat16 and empty.numel() == 0
    payload[8:16] = (9).to_bytes(8, "little")
    assert last.tolist() == [9]
