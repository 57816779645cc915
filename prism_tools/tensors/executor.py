"""The results of a communication event from its members' contributions (P§5.2: executed on the CPU once all are there).

Lists of tensors are ordered as capture/calls.py says. In order "rank" sums run by group rank, 16-bit floats accumulated in
float32: with two addends that equals gloo's and NCCL's bits; with more it may differ from a ring in the last bits (<= 2e-7
relative for float32). In order "ring" floats are added as gloo adds them (tensors/ring.py), whose bits all results then have.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from prism_tools.graph.schema import Op, Reduce, ReduceOrder
from prism_tools.tensors import ring

Tensors = list[torch.Tensor]

_FOLD: dict[Reduce, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    Reduce.SUM: torch.add,
    Reduce.AVG: torch.add,
    Reduce.PREMUL_SUM: torch.add,
    Reduce.PRODUCT: torch.mul,
    Reduce.MIN: torch.minimum,
    Reduce.MAX: torch.maximum,
    Reduce.BAND: torch.bitwise_and,
    Reduce.BOR: torch.bitwise_or,
    Reduce.BXOR: torch.bitwise_xor,
}


def fold(parts: Tensors, kind: Reduce, factor: float = 1.0) -> torch.Tensor:
    """Reduce equal-shaped tensors in order. The result has their dtype."""
    first = parts[0]
    wide = first.dtype.is_floating_point and first.dtype.itemsize < 4
    total = first.float() if wide else first.clone()
    if kind is Reduce.PREMUL_SUM:
        total = total * factor
    for part in parts[1:]:
        part = part.to(total.dtype)
        if kind is Reduce.PREMUL_SUM:
            part = part * factor
        if total.dtype == torch.bool and kind is Reduce.SUM:
            total = total | part
        else:
            total = _FOLD[kind](total, part)
    if kind is Reduce.AVG:
        whole = not (total.dtype.is_floating_point or total.dtype.is_complex)
        total = total.div(len(parts), rounding_mode="trunc") if whole else total / len(parts)  # as NCCL; gloo has none
    return total.to(first.dtype)


def fold_ring(parts: Tensors, kind: Reduce, factor: float, op: Op) -> torch.Tensor:
    """As fold, in gloo's order. What does not depend on the order, or gloo cannot add, is folded by rank."""
    first = parts[0]
    if first.is_complex() and kind in (Reduce.SUM, Reduce.AVG):  # torch has gloo add the real numbers in it
        if kind is Reduce.AVG and op is not Op.ALL_REDUCE:  # there torch divides the complex ones: other bits
            return fold_ring(parts, Reduce.SUM, factor, op) / len(parts)
        reals = [torch.view_as_real(part).view(-1) for part in parts]
        return torch.view_as_complex(fold_ring(reals, kind, factor, op).view(-1, 2))
    if first.dtype not in ring.TYPES or kind not in ring.COMBINE or len(parts) == 1:
        return fold(parts, kind, factor)
    if kind is Reduce.PREMUL_SUM:
        parts = [part * factor for part in parts]
    chunk_of = ring.reduce_chunk if op is Op.REDUCE else ring.all_reduce_chunk
    total = ring.fold(parts, kind, chunk_of(first.numel(), first.dtype.itemsize, len(parts)))
    return total / len(parts) if kind is Reduce.AVG else total


def _sums(ins: list[Tensors], kind: Reduce, factor: float, order: ReduceOrder, op: Op) -> Tensors:
    """The members' lists, reduced tensor by tensor; gloo's ring takes a list as one vector. Lists of several types are
    sparse tensors and their places, which gloo gathers, and adds rank by rank."""
    if order is ReduceOrder.RANK or any(tensor.dtype != ins[0][0].dtype for tensor in ins[0]):
        return [fold([mine[t] for mine in ins], kind, factor) for t in range(len(ins[0]))]
    flat = [mine[0] if len(mine) == 1 else torch.cat(mine) for mine in ins]
    return list(fold_ring(flat, kind, factor, op).split([tensor.numel() for tensor in ins[0]]))


def execute(
    op: Op,
    ins: list[Tensors],
    kind: Reduce,
    root: int,
    factor: float = 1.0,
    order: ReduceOrder = ReduceOrder.RANK,
    whole: bool = False,
) -> list[Tensors]:
    """Outputs of every member (by group rank) of a collective; members that receive nothing get [].

    ``ins[i]`` are member i's contributions. Members that receive the same get the same list object. ``whole``: the parts of
    a reduce_scatter are of one tensor for each output, which gloo reduces as one. ValueError for an operation or layout that
    does not exist.
    """
    size = len(ins)
    members = range(size)
    if op is Op.BARRIER:
        return [[] for _ in members]
    if op in (Op.ALL_REDUCE, Op.REDUCE):
        total = _sums(ins, kind, factor, order, op)
        return [total if op is Op.ALL_REDUCE or i == root else [] for i in members]
    if op is Op.BROADCAST:
        return [[] if i == root else ins[root] for i in members]
    if op is Op.ALL_GATHER:
        gathered = [ins[i][t] for t in range(len(ins[0])) for i in members]
        return [gathered] * size
    if op is Op.REDUCE_SCATTER:
        step = size if whole else 1
        starts = range(0, len(ins[0]) // size * size, step)
        sums = [out for k in starts for out in _sums([mine[k : k + step] for mine in ins], kind, factor, order, op)]
        return [sums[i::size] for i in members]
    if op is Op.ALL_TO_ALL:
        return [[ins[m][i] for m in members] for i in members]
    if op is Op.GATHER:
        return [[ins[m][0] for m in members] if i == root else [] for i in members]
    if op is Op.SCATTER:
        return [[ins[root][i]] for i in members]
    raise ValueError(f"{op.name} is not a collective")


def unpack(descs: list[tuple[str, int]], payload: memoryview) -> Tensors:
    """Tensors (flat views of ``payload``) of the given (dtype name, elements)."""
    tensors = []
    offset = 0
    for name, count in descs:
        dtype = getattr(torch, name)
        if count:
            tensors.append(torch.frombuffer(payload, dtype=dtype, count=count, offset=offset))
        else:
            tensors.append(torch.empty(0, dtype=dtype))
        offset += count * dtype.itemsize
    return tensors
