"""A program that communication steers: a loader's status as an object, tokens of a vocabulary, and splits of an all_to_all."""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh

VOCABULARY = 50

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
tp, dp, ranks = mesh["tp"].get_group(), mesh["dp"].get_group(), world // 2
source = dist.get_global_rank(tp, 0)
torch.manual_seed(0)
embedding, expert = nn.Embedding(VOCABULARY, 256), nn.Linear(256, 256)
parameters = [*embedding.parameters(), *expert.parameters()]
optimizer = torch.optim.SGD(parameters, lr=1e-3)
generator = torch.Generator().manual_seed(rank)

status = [{"batches": 3, "resume": None} if rank == source else None]
dist.broadcast_object_list(status, src=source, group=tp)
for step in range(status[0]["batches"]):
    tokens = torch.empty(4, 8, dtype=torch.int64)
    if rank == source:
        tokens.random_(0, VOCABULARY, generator=generator)
    dist.broadcast(tokens, source, group=tp)
    x = embedding(tokens.flatten())
    chosen = tokens.flatten() % ranks
    counts = torch.bincount(chosen, minlength=ranks)
    dist.all_to_all_single(arriving := torch.empty_like(counts), counts, group=dp)
    send, recv = counts.tolist(), arriving.tolist()
    rows = torch.empty(sum(recv), 256)
    dist.all_to_all_single(rows, x.detach()[chosen.argsort(stable=True)], recv, send, group=dp)
    loss = expert(rows).square().sum() + x.square().mean()
    optimizer.zero_grad()
    loss.backward()
    for parameter in parameters:
        dist.all_reduce(parameter.grad)
    optimizer.step()
    print(f"check rank {rank} step {step} {recv} {tokens.tolist()}\n", end="", flush=True)
