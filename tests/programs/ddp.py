"""DistributedDataParallel with several gradient buckets, AdamW and a DistributedSampler."""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
inputs, targets = torch.randn(128, 32), torch.randn(128, 4)
mlp = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
model = DistributedDataParallel(mlp, bucket_cap_mb=0.01)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
dataset = TensorDataset(inputs, targets)
sampler = DistributedSampler(dataset, shuffle=True)

step = 0
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in DataLoader(dataset, batch_size=16, sampler=sampler):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        print(f"loss rank {rank} step {step} {loss.item().hex()}\n", end="", flush=True)
        step += 1
dist.barrier()  # or a gloo thread may still free a tensor while Python shuts down, and abort
dist.destroy_process_group()
