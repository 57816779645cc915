"""Every type of element in every reduction and movement, and shapes that do not fit, under gloo, for live_suite.py."""

from functools import partial

import torch
import torch.distributed as dist
from live_job import CASES, case, done, outcome, rank, world, written, x
from torch.distributed import ReduceOp

NAMES = (
    "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 complex64 complex128 bool "
    "uint8 int8 int16 int32 int64 uint16 uint32 uint64"
)
TYPES = {name: getattr(torch, name) for name in NAMES.split()}
REDUCTIONS = {name: getattr(ReduceOp, name) for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")}


def data(count, dtype):
    """As x(), where torch can convert to the type."""
    return x(count, dtype=torch.float32).to(dtype) if dtype != torch.bool else x(count, dtype=dtype)


def parts(count, dtype):
    return [torch.zeros(count).to(dtype) for _ in range(world)]


def chosen(tensor):
    """What the others hold after a reduce to rank 1 is nobody's business."""
    return tensor if rank == 1 else None


def reduced(dtype, op):
    return chosen(done(*written(dist.reduce, data(6, dtype), 1, op)))


def reduced_later(dtype, op):
    """Where a refusal comes: at the call, or with the wait."""
    tensor = data(6, dtype)
    work = dist.all_reduce(tensor, op, async_op=True)
    text = outcome(work.wait)
    return text, work.is_completed(), None if "Error" in text else tensor


REDUCING = {
    "all_reduce": lambda t, op: done(*written(dist.all_reduce, data(6, t), op)),
    "reduce": reduced,
    "reduce_scatter": lambda t, op: done(*written(dist.reduce_scatter, parts(2, t)[0], [data(2, t)] * world, op)),
    "reduce_scatter_tensor": lambda t, op: done(
        *written(dist.reduce_scatter_tensor, parts(2, t)[0], data(2 * world, t), op)
    ),
    "all_reduce_later": reduced_later,
}
MOVING = {
    "broadcast": lambda t: done(*written(dist.broadcast, data(5, t), 1)),
    "all_gather": lambda t: done(*written(dist.all_gather, parts(3, t), data(3, t))),
    "all_gather_into": lambda t: done(*written(dist.all_gather_into_tensor, torch.cat(parts(3, t)), data(3, t))),
    "all_to_all": lambda t: done(*written(dist.all_to_all, parts(2, t), [data(2, t)] * world)),
    "all_to_all_single": lambda t: done(*written(dist.all_to_all_single, torch.cat(parts(2, t)), data(2 * world, t))),
    "scatter": lambda t: done(*written(dist.scatter, parts(2, t)[0], [data(2, t)] * world if rank == 1 else None, 1)),
    "gather": lambda t: done(*written(partial(dist.gather, data(2, t)), parts(2, t) if rank == 1 else None, 1)),
    "message": lambda t: done(*written(dist.isend if rank % 2 else dist.irecv, data(5, t), rank ^ 1)),
}
ZEROS = torch.zeros
MISFITS = {
    "all_gather_few": lambda: dist.all_gather(parts(4, torch.float32)[1:], x(4)),
    "all_gather_types": lambda: dist.all_gather(parts(4, torch.int32), x(4)),
    "all_gather_strided": lambda: done(*written(dist.all_gather, [ZEROS(3, 4).t() for _ in range(world)], x(4, 3))),
    "all_gather_into_strided": lambda: done(*written(dist.all_gather_into_tensor, ZEROS(3, 4 * world).t(), x(4, 3))),
    "all_gather_into_flat": lambda: done(*written(dist.all_gather_into_tensor, ZEROS(12 * world), x(4, 3))),
    "all_gather_of_scalars": lambda: done(*written(dist.all_gather_into_tensor, ZEROS(world), x(1)[0])),
    "all_gather_coalesced_sizes": lambda: dist.all_gather_coalesced([[ZEROS(3)] for _ in range(world)], [x(4)]),
    "reduce_scatter_few": lambda: dist.reduce_scatter(ZEROS(4), [x(4)] * (world - 1)),
    "reduce_scatter_sizes": lambda: dist.reduce_scatter(ZEROS(4), [x(3)] * world),
    "reduce_scatter_types": lambda: dist.reduce_scatter(ZEROS(4), [x(4).long()] * world),
    "reduce_scatter_tensor_sizes": lambda: dist.reduce_scatter_tensor(ZEROS(3), x(2 * world)),
    "reduce_scatter_tensor_flat": lambda: done(*written(dist.reduce_scatter_tensor, ZEROS(2, 3), x(6 * world))),
    "reduce_scatter_tensor_types": lambda: dist.reduce_scatter_tensor(ZEROS(2).long(), x(2 * world)),
    "reduce_scatter_tensor_strided": lambda: done(
        *written(dist.reduce_scatter_tensor, ZEROS(3, 2).t(), x(3, 2 * world).t())
    ),
    "all_to_all_few": lambda: dist.all_to_all(parts(4, torch.float32)[1:], [x(4)] * (world - 1)),
    "all_to_all_types": lambda: dist.all_to_all(parts(4, torch.int32), [x(4)] * world),
    "all_to_all_single_splits": lambda: dist.all_to_all_single(ZEROS(8), x(8), [1] * world, [1] * world),
    "all_to_all_single_few": lambda: dist.all_to_all_single(ZEROS(8), x(8), [8], [8]),
    "all_to_all_single_types": lambda: dist.all_to_all_single(ZEROS(8).long(), x(8)),
    "all_to_all_single_strided": lambda: done(*written(dist.all_to_all_single, ZEROS(2, 8).t(), x(2, 8).t())),
    "broadcast_strided": lambda: done(*written(dist.broadcast, x(4, 6)[:, ::2], 1)),
    "reduce_strided": lambda: chosen(done(*written(dist.reduce, x(4, 6)[:, ::2], 1))),
    "reduce_nowhere": lambda: dist.reduce(x(4), world),
    "gather_nowhere": lambda: dist.gather(x(4), dst=world),
    "scatter_nowhere": lambda: dist.scatter(x(4), src=world),
    "gather_few": lambda: dist.gather(x(4), parts(4, torch.float32)[1:] if rank == 1 else None, 1) if rank == 1 else 0,
    "scatter_few": lambda: dist.scatter(x(4), [x(4)] * (world - 1), rank),
    "gather_sizes": lambda: dist.gather(x(4), parts(3, torch.float32), rank),
    "scatter_sizes": lambda: dist.scatter(x(4), [x(3)] * world, rank),
    "gather_types": lambda: dist.gather(x(4), parts(4, torch.int32), rank),
    "scatter_types": lambda: dist.scatter(x(4), [x(4).int()] * world, rank),
    "all_reduce_coalesced_types": lambda: dist.all_reduce_coalesced([x(4), x(3).int()]),
    "message_strided": lambda: dist.send(x(4, 6)[:, ::2], rank ^ 1),
}


def sparse(op, dtype=torch.float32, **options):
    """Each rank has the places up to its own number, of a matrix with dense rows."""
    matrix = torch.sparse_coo_tensor(torch.arange(rank + 1)[None], x(rank + 1, 2, dtype=dtype), (world, 2))
    work = dist.all_reduce(matrix, op, async_op=True)
    work.wait()
    return [tensor.to_dense() for tensor in work.result()], matrix.to_dense()


def register():
    for kind, function in REDUCING.items():
        for short, dtype in TYPES.items():
            for name, op in REDUCTIONS.items():
                case(partial(function, dtype, op), f"type_{kind}_{short}_{name}")
    for kind, function in MOVING.items():
        for short, dtype in TYPES.items():
            case(partial(function, dtype), f"type_{kind}_{short}")
    CASES.update({f"misfit_{name}": function for name, function in MISFITS.items()})
    CASES.update({f"sparse_{name}": partial(sparse, op) for name, op in REDUCTIONS.items()})
    CASES.update(sparse_int64=partial(sparse, ReduceOp.SUM, torch.int64))
