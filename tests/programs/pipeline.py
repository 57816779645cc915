"""A two-stage 1F1B pipeline whose shapes are inferred at the first step, replicated world / 2 times with DDP."""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("pp", "dp"))
stage = mesh.get_local_rank("pp")
torch.manual_seed(stage)
layers = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
model = DistributedDataParallel(layers, process_group=mesh["dp"].get_group()) if world > 2 else layers
pipe = PipelineStage(model, stage, 2, torch.device("cpu"), group=mesh["pp"].get_group())
schedule = Schedule1F1B(pipe, 4, loss_fn=F.mse_loss)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
generator = torch.Generator().manual_seed(7 + mesh.get_local_rank("dp"))

for step in range(3):
    x, y = torch.randn(2, 16, 16, generator=generator)
    optimizer.zero_grad()
    losses = []
    if stage == 0:
        schedule.step(x)
    else:
        schedule.step(target=y, losses=losses)
    optimizer.step()
    if losses:
        loss = torch.stack(losses).mean().item()
        print(f"loss rank {rank} step {step} {loss.hex()}\n", end="", flush=True)
dist.barrier()
dist.destroy_process_group()
