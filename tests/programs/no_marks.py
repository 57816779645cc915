"""A loop of collectives without an optimizer: iterations show only in the period of the operations."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
value = torch.full((4,), rank + 1.0)
for step in range(6):
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    dist.broadcast(value, src=0)
    parts = [torch.empty(4) for _ in range(world)]
    dist.all_gather(parts, value + rank)
    value = parts[rank] / 2
    print(f"check rank {rank} step{step} {value[0].item().hex()}\n", end="", flush=True)
dist.barrier()
dist.destroy_process_group()
