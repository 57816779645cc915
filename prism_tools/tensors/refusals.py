"""What a real backend refuses to do with a type of element, when an operation runs: as its members' wait raises it."""

from __future__ import annotations

import functools

from prism_tools.graph.schema import P2P, Op, Reduce

# Gloo's collectives know these types; complex ones are pairs of numbers where something is summed.
_GLOO = {
    "float32": "Float",
    "float64": "Double",
    "float16": "Half",
    "bfloat16": "BFloat16",
    "int64": "Long",
    "int32": "Int",
    "int8": "Char",
    "uint8": "Byte",
    "bool": "Bool",
}
_REDUCING = (Op.ALL_REDUCE, Op.REDUCE, Op.REDUCE_SCATTER)
_BITS = (Reduce.BAND, Reduce.BOR, Reduce.BXOR)
# Torch prints the reduction's number as a character there.
_IN_TORCH = (Reduce.SUM, Reduce.AVG, Reduce.PRODUCT, Reduce.MIN, Reduce.MAX, *_BITS)


@functools.cache
def refusal(backend: str, op: Op, kind: Reduce, dtype: str) -> str:
    """The text of the RuntimeError that ``backend`` raises on every member for elements of ``dtype``; "" if it does not.

    NCCL refuses none of what programs get past torch's own checks: it has averages of integers and sums of truth values.
    """
    if backend != "gloo" or op in P2P or op is Op.BARRIER:
        return ""
    if dtype.startswith("complex") and op in _REDUCING:
        if kind in (Reduce.SUM, Reduce.AVG):
            return ""
        name = "reduce" if op is Op.REDUCE else "all_reduce"
        return f"{name} does not support{chr(_IN_TORCH.index(kind))}on complex tensors"
    if dtype not in _GLOO:
        return "Invalid scalar type"
    is_float = "float" in dtype
    if kind in _BITS and is_float:
        return f"Cannot use ReduceOp.{kind.name} with non-integral dtype"
    if kind is Reduce.AVG and not is_float:
        return f"result type Float can't be cast to the desired output type {_GLOO[dtype]}"
    return ""
