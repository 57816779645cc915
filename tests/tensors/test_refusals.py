"""What backends refuse, by type of element; tests/record/test_coverage.py compares all of it with gloo."""

import pytest

from prism_tools.graph.schema import Op, Reduce
from prism_tools.tensors.refusals import refusal


@pytest.mark.parametrize(
    ("op", "kind", "dtype", "text"),
    [
        (Op.ALL_REDUCE, Reduce.SUM, "float16", ""),
        (Op.ALL_REDUCE, Reduce.SUM, "uint16", "Invalid scalar type"),
        (Op.BROADCAST, Reduce.NONE, "float8_e5m2", "Invalid scalar type"),
        (Op.SEND, Reduce.NONE, "float8_e5m2", ""),
        (Op.REDUCE, Reduce.AVG, "int32", "result type Float can't be cast to the desired output type Int"),
        (Op.REDUCE, Reduce.BAND, "bfloat16", "Cannot use ReduceOp.BAND with non-integral dtype"),
        (Op.REDUCE, Reduce.MAX, "complex64", "reduce does not support\4on complex tensors"),
        (Op.REDUCE_SCATTER, Reduce.AVG, "complex64", ""),
        (Op.GATHER, Reduce.NONE, "complex64", "Invalid scalar type"),
    ],
)
def test_gloo(op, kind, dtype, text):
    assert refusal("gloo", op, kind, dtype) == text
    assert refusal("nccl", op, kind, dtype) == ""
