"""What generators give, beside what the executor gives when all members really contribute the same."""

import numpy as np
import pytest
import torch

from prism_tools.graph.schema import Op, Reduce
from prism_tools.tensors.executor import execute
from prism_tools.tensors.generate import Received, fill
from prism_tools.tensors.rules import Generator, Occasion

RANKS = (1, 3, 5)
ME = 1
OCCASION = Occasion(("all_reduce",), ("world", "0"), 0, "float32", 16, "")


def received(op, ins, outs, kind=Reduce.NONE, factor=1.0, root=-1, occasion=OCCASION):
    return Received(op, ins, outs, kind, factor, root, -1, RANKS[ME], RANKS, occasion)


def members(op, mine, kind=Reduce.NONE, factor=1.0, root=-1):
    """What every member of three has when all contribute ``mine``."""
    return execute(op, [mine] * 3, kind, root, factor, whole=False)[ME]


FLOATS, WHOLE = (torch.float32, torch.bfloat16), (torch.int64, torch.uint8, torch.bool)
KINDS = {
    (Reduce.SUM, Reduce.PRODUCT, Reduce.MIN, Reduce.MAX): FLOATS + WHOLE,
    (Reduce.AVG, Reduce.PREMUL_SUM): FLOATS,
    (Reduce.BAND, Reduce.BOR, Reduce.BXOR): WHOLE,
}


@pytest.mark.parametrize(
    ("kind", "dtype"), [(kind, dtype) for kinds, types in KINDS.items() for kind in kinds for dtype in types]
)
@pytest.mark.parametrize("op", [Op.ALL_REDUCE, Op.REDUCE_SCATTER])
def test_self_reduces(op, kind, dtype):
    values = torch.tensor([0, 1, 2, 3], dtype=dtype)
    mine = [values.clone() if op is Op.ALL_REDUCE else values + k for k in range(3 if op is Op.REDUCE_SCATTER else 1)]
    if dtype is torch.bool:
        mine = [tensor.to(dtype) for tensor in mine]
    expected = members(op, [tensor.clone() for tensor in mine], kind, 0.5)
    outs = mine if op is Op.ALL_REDUCE else [torch.empty_like(values)]
    fill(received(op, mine, outs, kind, 0.5), Generator("self"))
    assert torch.equal(outs[0], expected[0]) and outs[0].dtype == expected[0].dtype


def test_a_sum_scales_in_place():
    mine = torch.tensor([1.5, -2.0], requires_grad=True)
    version = mine._version
    fill(received(Op.ALL_REDUCE, [mine], [mine], Reduce.SUM), Generator("self"))
    assert mine.tolist() == [4.5, -6.0] and mine._version == version  # past autograd


@pytest.mark.parametrize("op", [Op.ALL_GATHER, Op.ALL_TO_ALL, Op.GATHER])
def test_self_tiles(op):
    mine = [torch.tensor([k, k + 0.5]) for k in range(3 if op is Op.ALL_TO_ALL else 1)]
    outs = [torch.full((2,), torch.nan) for _ in range(3)]
    fill(received(op, mine, outs, root=ME), Generator("self"))
    expected = members(op, mine, root=ME)
    assert [out.tolist() for out in outs] == [tensor.tolist() for tensor in expected]


def test_self_where_nothing_is_held():
    broadcast, arrived = torch.tensor([2.0, torch.nan]), torch.full((2,), torch.nan)
    fill(received(Op.BROADCAST, [], [broadcast], root=0), Generator("self"))
    fill(received(Op.RECV, [], [arrived]), Generator("self"))
    assert (broadcast.tolist(), arrived.tolist()) == ([2.0, 0.0], [0.0, 0.0])


def test_uneven_exchanges_have_the_receiver_s_shapes():
    outs = [torch.full((n,), -1.0) for n in (3, 2, 0)]
    fill(received(Op.ALL_TO_ALL, [torch.ones(1), torch.tensor([5.0, 6.0]), torch.ones(4)], outs), Generator("self"))
    assert [out.tolist() for out in outs] == [[5.0, 6.0, 5.0], [5.0, 6.0], []]


@pytest.mark.parametrize(
    ("generator", "expected"),
    [
        (Generator("zeros"), [0, 7, 0]),
        (Generator("splits-zero"), [0, 7, 0]),
        (Generator("constant", (4,)), [4, 7, 4]),
    ],
)
def test_a_rank_s_own_part_is_its_own(generator, expected):
    outs = [torch.full((1,), -1) for _ in range(3)]
    fill(received(Op.ALL_TO_ALL, [torch.tensor([k]) for k in (6, 7, 8)], outs), generator)
    assert [int(out) for out in outs] == expected


@pytest.mark.parametrize("op", [Op.ALL_GATHER, Op.GATHER, Op.ALL_TO_ALL])
@pytest.mark.parametrize(
    ("generator", "other"),
    [
        (Generator("self"), 7),
        (Generator("zeros"), 0),
        (Generator("constant", (4,)), 4),
        (Generator("randint", (5, 6)), 5),
        (Generator("from",), 9),
        (Generator("python",), 3),
    ],
)  # fmt: skip
def test_an_own_part_among_the_results_is_kept(op, generator, other, tmp_path, monkeypatch):
    """What is gathered in place: the input is a view of the output, as ZeRO's all_gathers have it."""
    np.save(tmp_path / "nines.npy", np.full(6, 9))
    (tmp_path / "threes.py").write_text("def fill(call):\n    for out in call.outs:\n        out.fill_(3)\n")
    monkeypatch.syspath_prepend(tmp_path)  # and taken out again
    arguments = {"from": (str(tmp_path / "nines.npy"),), "python": ("threes", "fill", str(tmp_path))}
    generator = Generator(generator.kind, arguments.get(generator.kind, generator.arguments))
    outs = list(torch.full((6,), 7).chunk(3))
    fill(received(op, outs if op is Op.ALL_TO_ALL else [outs[ME]], outs, root=ME), generator)
    assert [out.tolist() for out in outs] == [[other] * 2, [7] * 2, [other] * 2]


@pytest.mark.parametrize("generator", [Generator("self"), Generator("zeros"), Generator("randint", (0, 2))])
def test_the_root_of_a_scatter_has_its_own_part(generator):
    out = torch.full((2,), -1)
    fill(received(Op.SCATTER, [torch.full((2,), k) for k in (6, 7, 8)], [out], root=ME), generator)
    assert out.tolist() == [7, 7]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.float16])
def test_memory_that_nobody_has_written(dtype):
    """Whatever bits there are, finite numbers come out, and those that were there stay."""
    out = torch.tensor([1.5, float("nan"), -2.0]).to(dtype)
    fill(received(Op.BROADCAST, [], [out], root=0), Generator("self"))
    assert out.to(torch.complex64).tolist() == [1.5, 0, -2]


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64, torch.uint8])
def test_products_of_unsigned_numbers(dtype):
    out = torch.tensor([0, 2, 200]).to(dtype)
    fill(received(Op.ALL_REDUCE, [out], [out], Reduce.PRODUCT), Generator("self"))
    assert out.tolist() == [0, 8, 200**3 % 2 ** (8 * dtype.itemsize)]


@pytest.mark.parametrize(
    ("dtype", "generator", "message"),
    [
        (torch.uint8, Generator("randint", (200, 257)), "256 is no uint8"),
        (torch.int8, Generator("constant", (128,)), "128 is no int8"),
        (torch.int64, Generator("constant", (0.5,)), "0.5 is no int64"),
        (torch.bool, Generator("constant", (2,)), "2 is no bool"),
        (torch.int32, Generator("from", (1.5,)), "1.5 is no int32"),
        (torch.int32, Generator("from", (2**31,)), "2147483648 is no int32"),
        (torch.float32, Generator("from", (1j,)), "1j is no float32"),
    ],
)
def test_numbers_that_the_type_does_not_have(dtype, generator, message, tmp_path):
    if generator.kind == "from":
        np.save(tmp_path / "a.npy", np.array(generator.arguments * 3))
        generator = Generator("from", (str(tmp_path / "a.npy"),))
    with pytest.raises(ValueError, match=f"^{message}$"):
        fill(received(Op.RECV, [], [torch.zeros(3).to(dtype)]), generator)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.bfloat16, torch.complex64, torch.float8_e5m2])
def test_numbers_of_any_type(dtype):
    for generator in (Generator("constant", (1,)), Generator("constant", (1.0,)), Generator("randint", (1, 2))):
        for shape in ((), (0,), (2, 3)):
            out = torch.zeros(shape).to(dtype)
            fill(received(Op.RECV, [], [out]), generator)
            assert out.to(torch.complex64).equal(torch.ones(shape, dtype=torch.complex64))


def test_numbers_in_a_range_are_the_same_on_all_members():
    first, again = torch.empty(1000, dtype=torch.int64), torch.empty(1000, dtype=torch.int64)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    for out, me in ((first, 1), (again, 2)):
        call = Received(Op.BROADCAST, [], [out], Reduce.NONE, 1.0, 0, -1, RANKS[me], RANKS, OCCASION)
        fill(call, Generator("randint", (10, 13)))
    assert set(first.tolist()) == {10, 11, 12} and torch.equal(first, again)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_file(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(6).reshape(2, 3))
    outs = [torch.empty(2, 2), torch.empty(1)]
    fill(received(Op.RECV, [], outs), Generator("from", (str(tmp_path / "a.npy"),)))
    assert [out.tolist() for out in outs] == [[[0, 1], [2, 3]], [4]]
    with pytest.raises(ValueError, match="has 6 elements where 7 are received"):
        fill(received(Op.RECV, [], [torch.empty(7)]), Generator("from", (str(tmp_path / "a.npy"),)))


def test_what_does_not_fit():
    with pytest.raises(ValueError, match="splits-zero answers counts, not float32; use zeros"):
        fill(received(Op.RECV, [], [torch.empty(2)]), Generator("splits-zero"))
    with pytest.raises(ValueError, match="another rank's object is not made up"):
        within = Occasion(("recv", "recv_object_list"), ("world", "0"), 0, "int64", 8, "")
        fill(received(Op.RECV, [], [torch.empty(1)], occasion=within), Generator("self"))
    with pytest.raises(ValueError, match="object answers torch's object functions"):
        fill(received(Op.RECV, [], [torch.empty(2)]), Generator("object", (1,)))
