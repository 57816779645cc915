"""Every c10d operation once: each rank prints `check rank R NAME BYTES` for each, so that runs can be compared.

Sums are of small whole numbers, hence exact in any order. The world must be even, and at least 4.
"""

import warnings

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
import torch.distributed.nn.functional as differentiable
from torch.distributed import ReduceOp

warnings.filterwarnings("ignore", category=FutureWarning)  # the deprecated names exist in more versions
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
after, before, size = (rank + 1) % world, (rank - 1) % world, world // 2
half, _ = dist.new_subgroups_by_enumeration([list(range(i, world, 2)) for i in range(2)])


def x(count=4, dtype=torch.float32):
    return (torch.arange(count) % 5 + 1 + rank).to(dtype)


def done(op, tensor, *args, **options):
    """The tensor, or list of tensors, after an operation that writes it."""
    op(tensor, *args, **options)
    return tensor


def zeros(*counts):
    return [torch.zeros(count) for count in counts]


def reversed_waits():
    tensors = [x(), x(3), x(2)]
    for work in reversed([dist.all_reduce(tensor, async_op=True) for tensor in tensors]):
        work.wait()
    return tensors


def coalesced(op, outputs, *inputs, async_ops=False):
    with dist._coalescing_manager(async_ops=async_ops) as manager:
        for arguments in zip(outputs, *inputs, strict=True):
            op(*arguments)
    if async_ops:
        manager.wait()
    return outputs


def ring(tensor):
    send, recv = dist.isend(x(), after, tag=3), dist.irecv(tensor, before, tag=3)
    recv.wait()
    send.wait()


def batch(tensor):
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x(), after), dist.P2POp(dist.irecv, tensor, before)]):
        work.wait()


def tags_out_of_order(tensors):
    if rank == 0:
        works = [dist.isend(x(2) * tag, 1, tag=tag) for tag in (1, 2)]
    else:
        works = [dist.irecv(tensors[tag - 1], 0, tag=tag) for tag in (2, 1)] if rank == 1 else []
    for work in works:
        work.wait()


def any_source(tensors):
    if rank == 0:
        for _ in range(1, world):
            tensor = torch.zeros(4)
            tensors[dist.recv(tensor, tag=9)].copy_(tensor)
    else:
        dist.send(x(), 0, tag=9)


def object_p2p(objects):
    if rank % 2 == 0:
        dist.send_object_list([{"from": rank}, "text"], after)
    else:
        dist.recv_object_list(objects, before)


def differentiated():
    tensor = x().requires_grad_()
    differentiable.all_reduce(tensor).square().sum().backward()
    return tensor.grad


def waited(result):
    return [fc.wait_tensor(tensor) for tensor in result] if isinstance(result, list) else fc.wait_tensor(result)


splits = [other + 1 for other in range(world)]  # this rank sends other + 1 rows to each rank
CHECKS = {
    "sum": lambda: done(dist.all_reduce, x()),
    "product": lambda: done(dist.all_reduce, x(), ReduceOp.PRODUCT),
    "min": lambda: done(dist.all_reduce, x(), ReduceOp.MIN),
    "max_uint8": lambda: done(dist.all_reduce, x(dtype=torch.uint8), ReduceOp.MAX),
    "avg": lambda: done(dist.all_reduce, x(), ReduceOp.AVG),
    "bor_int32": lambda: done(dist.all_reduce, x(dtype=torch.int32), ReduceOp.BOR),
    "sum_int64": lambda: done(dist.all_reduce, x(dtype=torch.int64)),
    "sum_bfloat16": lambda: done(dist.all_reduce, x(dtype=torch.bfloat16)),
    "sum_float64": lambda: done(dist.all_reduce, x(dtype=torch.float64)),
    "sum_empty_shape": lambda: done(dist.all_reduce, x(1)[0]),
    "subgroup": lambda: done(dist.all_reduce, x(), group=half),
    "reversed_waits": reversed_waits,
    "future_then": lambda: dist.all_reduce(x(), async_op=True).get_future().then(lambda f: 2 * f.value()[0]).wait(),
    "reduce": lambda: done(dist.reduce, x(), 1) if rank == 1 else dist.reduce(x(), 1),
    "broadcast": lambda: done(dist.broadcast, x(), 2),
    "all_gather": lambda: done(dist.all_gather, zeros(*[4] * world), x()),
    "all_gather_into": lambda: done(dist.all_gather_into_tensor, torch.zeros(4 * world), x()),
    "gather": lambda: done(lambda out: dist.gather(x(), out, dst=1), zeros(*[4] * world) if rank == 1 else None),
    "scatter": lambda: done(dist.scatter, torch.zeros(4), [x() + i for i in range(world)] if rank == 1 else None, 1),
    "reduce_scatter": lambda: done(dist.reduce_scatter, torch.zeros(4), [x() + i for i in range(world)]),
    "reduce_scatter_tensor": lambda: done(dist.reduce_scatter_tensor, torch.zeros(2), x(2 * world)),
    "all_to_all": lambda: done(dist.all_to_all, zeros(*[2] * world), [x(2) + i for i in range(world)]),
    "all_to_all_single": lambda: done(dist.all_to_all_single, torch.zeros(2 * world), x(2 * world)),
    "all_to_all_uneven": lambda: done(
        dist.all_to_all_single, torch.zeros(world * (rank + 1)), x(sum(splits)), [rank + 1] * world, splits
    ),
    "all_to_all_arrays": lambda: done(
        dist.all_to_all_single,
        torch.zeros(world * (rank + 1)),
        x(sum(splits)),
        np.full(world, rank + 1),
        np.array(splits),
    ),
    "coalesced_reduce": lambda: coalesced(dist.all_reduce, [x(), x(3)]),
    "coalesced_gather": lambda: coalesced(
        dist.all_gather_into_tensor, zeros(4 * world, 2 * world), [x(), x(2)], async_ops=True
    ),
    "coalesced_scatter": lambda: coalesced(dist.reduce_scatter_tensor, zeros(2, 1), [x(2 * world), x(world)]),
    "all_gather_object": lambda: done(dist.all_gather_object, [None] * world, {"rank": rank}),
    "broadcast_object": lambda: done(dist.broadcast_object_list, ["here", rank] if rank == 0 else [None] * 2, 0),
    "gather_object": lambda: done(
        lambda out: dist.gather_object("x" * rank, out), [None] * world if rank == 0 else None
    ),
    "scatter_object": lambda: done(dist.scatter_object_list, [None], [[i] * i for i in range(world)], 0),
    "object_p2p": lambda: done(object_p2p, [None, None]),
    "ring": lambda: done(ring, torch.zeros(4)),
    "batch": lambda: done(batch, torch.zeros(4)),
    "tags_out_of_order": lambda: done(tags_out_of_order, zeros(2, 2)),
    "any_source": lambda: done(any_source, zeros(*[4] * world)),
    "fc_all_reduce": lambda: waited(fc.all_reduce(x(), "sum", half)),
    "fc_all_gather": lambda: waited(fc.all_gather_tensor(x(), 0, half)),
    "fc_reduce_scatter": lambda: waited(fc.reduce_scatter_tensor(x(2 * size), "sum", 0, half)),
    "fc_all_to_all": lambda: waited(fc.all_to_all_single(x(2 * size), None, None, half)),
    "fc_broadcast": lambda: waited(fc.broadcast(x(), 0, half)),
    "fc_reduce_coalesced": lambda: waited(fc.all_reduce_coalesced([x(), x(2)], "sum", half)),
    "fc_gather_coalesced": lambda: waited(fc.all_gather_into_tensor_coalesced([x(), x(2)], half)),
    "fc_scatter_coalesced": lambda: waited(
        fc.reduce_scatter_tensor_coalesced([x(2 * size), x(size)], "sum", [0, 0], half)
    ),
    "differentiated": differentiated,
    "barrier": dist.barrier,
    "barrier_async": lambda: done(lambda _: dist.barrier(async_op=True).wait(), None),
    "monitored_barrier": dist.monitored_barrier,
}


def as_hex(value):
    if isinstance(value, torch.Tensor):
        return bytes(value.detach().reshape(-1).contiguous().view(torch.uint8).tolist()).hex()
    if isinstance(value, list):
        return "-".join(map(as_hex, value))
    return repr(value).encode().hex()


for name, check in CHECKS.items():
    print(f"check rank {rank} {name} {as_hex(check())}\n", end="", flush=True)
dist.destroy_process_group()
