"""Data-parallel training that goes on until it is interrupted; rank 0 prints `ready` after its first step."""

import itertools

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for step in itertools.count():
    optimizer.zero_grad()
    loss = model(torch.full((2, 8), rank + 1.0)).square().mean()
    loss.backward()
    optimizer.step()
    if rank == 0 and step == 0:
        print("ready\n", end="", flush=True)
