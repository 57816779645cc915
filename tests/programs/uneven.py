"""Sums over all ranks, for which rank 1 is 100 ms late in each of four steps; uneven.py FILE: 150 ms times the number of its runs
with this FILE."""

import os
import sys
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
late = 0.1 * dist.get_rank()
if late and len(sys.argv) > 1:
    with open(sys.argv[1], "a") as file:
        file.write("x")
    late = 0.15 * os.path.getsize(sys.argv[1])
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    time.sleep(late)
    model(torch.ones(1, 2)).sum().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
dist.destroy_process_group()
