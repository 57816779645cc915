"""Expert parallelism with value-dependent splits, then any-source receives and a batched ring."""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, send, recv, group):
        ctx.send, ctx.recv, ctx.group = send, recv, group
        out = rows.new_empty(sum(recv), rows.shape[1])
        dist.all_to_all_single(out, rows.contiguous(), recv, send, group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        return Exchange.apply(grad, ctx.recv, ctx.send, ctx.group), None, None, None


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("copies", "ep"))
copies, ep = mesh["copies"].get_group(), mesh["ep"].get_group()
router = nn.Parameter(torch.eye(16, 2))
torch.manual_seed(mesh.get_local_rank("ep"))
expert = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
parameters = [router, *expert.parameters()]
optimizer = torch.optim.SGD(parameters, lr=0.5)
generator = torch.Generator().manual_seed(rank)
for step in range(4):
    x = torch.randn(24, 16, generator=generator)
    gate, chosen = (x @ router).softmax(-1).max(-1)
    order = chosen.argsort(stable=True)
    counts = torch.bincount(chosen, minlength=2)
    dist.all_to_all_single(arriving := torch.empty_like(counts), counts, group=ep)
    send, recv = counts.tolist(), arriving.tolist()
    y = Exchange.apply(expert(Exchange.apply(x[order], send, recv, ep)), recv, send, ep)
    loss = (torch.zeros_like(y).index_copy(0, order, y) * gate[:, None] - x.sin()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    dist.all_reduce(router.grad, group=ep)
    for parameter in parameters:
        dist.all_reduce(parameter.grad, group=copies)
        parameter.grad /= world
    optimizer.step()
    print(f"loss rank {rank} step {step} {loss.item().hex()} send {send}\n", end="", flush=True)

mine, other = torch.tensor([float(rank)]), torch.empty(1)
if rank == 0:
    assert {dist.recv(other, tag=1) for _ in range(world - 1)} == set(range(1, world))
else:
    dist.send(mine, 0, tag=1)
ring = [dist.P2POp(dist.isend, mine, (rank + 1) % world), dist.P2POp(dist.irecv, other, (rank - 1) % world)]
for work in dist.batch_isend_irecv(ring):
    work.wait()
print(f"check rank {rank} ring {other.item().hex()}\n", end="", flush=True)
dist.barrier()
dist.destroy_process_group()
