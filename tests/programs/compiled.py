"""torch.compile with inductor of code that communicates; prints what it gives."""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc


def summed(tensor):
    return fc.all_reduce(tensor * 2, "sum", dist.group.WORLD) + 1


def gathered(tensor):
    return fc.all_gather_tensor(tensor + 1, 0, dist.group.WORLD) * 3


def inductor():
    x = torch.arange(8.0) + rank
    return [torch.compile(each, backend="inductor", fullgraph=True)(x).tolist() for each in (summed, gathered)]


dist.init_process_group("gloo")
rank = dist.get_rank()
print(f"check rank {rank} inductor {inductor()}\n", end="", flush=True)
dist.destroy_process_group()
