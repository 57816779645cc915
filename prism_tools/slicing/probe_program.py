"""What the communication-only processes run: each operation several times, every time another member arriving last."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from prism_tools.graph.schema import DTYPES, Op, Reduce

if TYPE_CHECKING:
    import torch

    from prism_tools.calibrate.probes import Key

REPEATS = 15
LATE = 0.005  # seconds by which the last member is late: the others wait by then, and all have been idle as in a job


def program(plans: list[Key], repeats: int) -> None:
    """Run in every probing process, as a torch.distributed program: ``repeats`` synchronous calls of each operation, then
    as many asynchronous ones."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    store = dist.distributed_c10d._get_default_store()
    groups = {size: dist.new_group(list(range(size))) for size in sorted({plan.size for plan in plans})}
    for number, plan in enumerate(plans):
        if rank >= plan.size:
            continue
        call = operation(plan, groups[plan.size], rank)
        for repeat in range(2 * repeats):
            align(store, f"probe/{number}/{repeat}", plan.size)
            if rank == late_member(plan, repeat):
                time.sleep(LATE)
            work = call(repeat >= repeats)
            if work is not None:
                work.wait()
    align(store, "probe/end", dist.get_world_size())


def late_member(plan: Key, repeat: int) -> int:
    """Who arrives last: the root where others need it and it does not need them, else each in turn."""
    return 0 if plan.op in (Op.BROADCAST, Op.SCATTER, Op.GATHER) else repeat % plan.size


def align(store: object, key: str, count: int) -> None:
    """A barrier through the store, which the tracer does not see."""
    if store.add(key, 1) == count:  # type: ignore[attr-defined]
        store.set(key + "/all", "1")  # type: ignore[attr-defined]
    store.wait([key + "/all"])  # type: ignore[attr-defined]


def operation(plan: Key, group: object, rank: int):  # noqa: ANN201 - a closure of one argument
    """A function of ``later`` that performs the operation once; ``later``: asynchronously, returning its Work."""
    import torch
    import torch.distributed as dist

    dtype = getattr(torch, DTYPES[plan.dtype]) if plan.dtype >= 0 else torch.uint8
    count = plan.bytes // dtype.itemsize
    data = torch.zeros(count, dtype=dtype)
    kind = reduce_op(plan.reduce)
    match Op(plan.op):
        case Op.ALL_REDUCE:
            return lambda later: dist.all_reduce(data, kind, group, later)
        case Op.BROADCAST:
            return lambda later: dist.broadcast(data, group_src=0, group=group, async_op=later)
        case Op.REDUCE:
            return lambda later: dist.reduce(data, group_dst=0, op=kind, group=group, async_op=later)
        case Op.BARRIER:
            return lambda later: dist.barrier(group, later)
        case Op.SEND:
            if rank == 0:
                return lambda later: (dist.isend if later else dist.send)(data, group_dst=1, group=group)
            return lambda later: receive(data, group, later)
    return shaped(Op(plan.op), data, plan.size, kind, group, rank)


def receive(data: torch.Tensor, group: object, later: bool):  # noqa: ANN201 - a Work or None
    """dist.recv returns the sender instead of a Work."""
    import torch.distributed as dist

    if later:
        return dist.irecv(data, group_src=0, group=group)
    dist.recv(data, group_src=0, group=group)
    return None


def shaped(op: Op, data: torch.Tensor, size: int, kind: object, group: object, rank: int):  # noqa: ANN201
    """The operations whose input and output sizes differ."""
    import torch
    import torch.distributed as dist

    pieces = list(data.tensor_split(size))
    match op:
        case Op.ALL_GATHER:
            many = [torch.zeros_like(data) for _ in range(size)]
            return lambda later: dist.all_gather(many, data, group, later)
        case Op.REDUCE_SCATTER:
            even = [torch.zeros(max(data.numel() // size, 1), dtype=data.dtype) for _ in range(size)]
            return lambda later: dist.reduce_scatter(torch.zeros_like(even[0]), even, kind, group, later)
        case Op.ALL_TO_ALL:
            splits = [len(piece) for piece in pieces]
            out = torch.zeros(splits[rank] * size, dtype=data.dtype)
            even_splits = [splits[rank]] * size
            return lambda later: dist.all_to_all_single(out, data, even_splits, splits, group, later)
        case Op.GATHER:
            gathered = [torch.zeros_like(data) for _ in range(size)] if rank == 0 else None
            return lambda later: dist.gather(data, gathered, group_dst=0, group=group, async_op=later)
        case Op.SCATTER:
            mine = torch.zeros(max(data.numel() // size, 1), dtype=data.dtype)
            parts = [torch.zeros_like(mine) for _ in range(size)] if rank == 0 else None
            return lambda later: dist.scatter(mine, parts, group_src=0, group=group, async_op=later)
    raise ValueError(f"{op.name} cannot be probed")


def reduce_op(kind: int):  # noqa: ANN201 - torch.distributed.ReduceOp's type is not a Python class
    """torch's reduction for the schema's."""
    import torch.distributed as dist

    if kind == Reduce.PREMUL_SUM:
        return dist.ReduceOp.SUM  # the same traffic
    return getattr(dist.ReduceOp, Reduce(kind).name) if kind else dist.ReduceOp.SUM
