"""Functional collectives, plain, differentiated and compiled, for live_suite.py."""

from functools import partial

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
import torch.distributed.nn.functional as differentiable
from live_job import CASES, case, device, pair, world, x
from torch.distributed.device_mesh import init_device_mesh


def waited(result):
    return [fc.wait_tensor(tensor) for tensor in result] if isinstance(result, list) else fc.wait_tensor(result)


def gradient(function, *shape):
    tensor = x(*shape).requires_grad_()
    result = function(tensor)
    sum(part.square().sum() for part in (result if isinstance(result, list | tuple) else [result])).backward()
    return result, tensor.grad


FUNCTIONAL = {
    "all_reduce": lambda g, n: fc.all_reduce(x(4), "sum", g),
    "all_reduce_avg": lambda g, n: fc.all_reduce(x(4), "avg", g),
    "all_gather": lambda g, n: fc.all_gather_tensor(x(4), 0, g),
    "all_gather_dim1": lambda g, n: fc.all_gather_tensor(x(2, 3), 1, g),
    "reduce_scatter": lambda g, n: fc.reduce_scatter_tensor(x(2 * n), "sum", 0, g),
    "reduce_scatter_dim1": lambda g, n: fc.reduce_scatter_tensor(x(2, 2 * n), "sum", 1, g),
    "all_to_all": lambda g, n: fc.all_to_all_single(x(2 * n), None, None, g),
    "all_to_all_splits": lambda g, n: fc.all_to_all_single(x(3 * n), [3] * n, [3] * n, g),
    "broadcast": lambda g, n: fc.broadcast(x(4), 0, g),
    "permute": lambda g, n: fc.permute_tensor(x(4), [(i + 1) % n for i in range(n)], g),
    "reduce_coalesced": lambda g, n: fc.all_reduce_coalesced([x(4), x(2)], "sum", g),
    "gather_coalesced": lambda g, n: fc.all_gather_into_tensor_coalesced([x(4), x(2)], g),
    "scatter_coalesced": lambda g, n: fc.reduce_scatter_tensor_coalesced([x(2 * n), x(n)], "sum", [0, 0], g),
    "in_place": lambda g, n: fc.all_reduce_inplace(x(4), group=g),
}
AUTOGRAD = {
    "fc_all_gather": lambda t: fc.all_gather_tensor_autograd(t, 0, pair),
    "fc_reduce_scatter": lambda t: fc.reduce_scatter_tensor_autograd(t, "sum", 0, pair),
    "fc_all_to_all": lambda t: fc.all_to_all_single_autograd(t, None, None, pair),
    "nn_all_reduce": differentiable.all_reduce,
    "nn_all_gather": differentiable.all_gather,
    "nn_reduce_scatter": lambda t: differentiable.reduce_scatter(torch.empty_like(t), [t * i for i in range(world)]),
    "nn_all_to_all": lambda t: differentiable.all_to_all_single(torch.empty_like(t), t),
    "nn_broadcast": lambda t: differentiable.broadcast(t, 0),
}


@torch.compile(backend="aot_eager", fullgraph=True)
def compiled_sum(tensor):
    return fc.all_reduce(tensor * 2, "sum", dist.group.WORLD) + 1


@torch.compile(backend="aot_eager", fullgraph=True)
def compiled_in_place(tensor):
    tensor = tensor * 2
    dist.all_reduce(tensor)
    return tensor + 1


def register():
    for name, function in FUNCTIONAL.items():
        case(lambda f=function: waited(f(dist.group.WORLD, world)), f"fc_{name}")
        case(lambda f=function: waited(f(pair, 2)), f"fc_{name}_pair")
    for name, function in AUTOGRAD.items():
        case(partial(gradient, function, 4 * world), f"autograd_{name}")
    CASES.update(
        fc_not_waited=lambda: fc.all_reduce(x(4), "sum", dist.group.WORLD) + 1,
        fc_group_of_ranks=lambda: waited(fc.all_reduce(x(4), "sum", list(range(world)))),
        fc_group_of_a_mesh=lambda: waited(fc.all_reduce(x(4), "sum", init_device_mesh(device.type, (world,)))),
        fc_compiled=lambda: [compiled_sum(x(4)), compiled_sum(x(4) + 1)],
        fc_compiled_in_place=lambda: compiled_in_place(x(4)),
    )
