"""Data-parallel training in which rank 1 kills itself at step 1."""

import os
import signal

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for step in range(4):
    if rank == 1 and step == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.zero_grad()
    loss = model(torch.full((2, 8), rank + 1.0)).square().mean()
    loss.backward()
    optimizer.step()
    print(f"loss rank {rank} step {step} {loss.item().hex()}\n", end="", flush=True)
dist.destroy_process_group()
