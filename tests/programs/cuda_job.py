"""A job as it is written for GPUs: NCCL, DDP, streams, events, autocast, GradScaler. Argument: cuda (default) or cpu, with gloo.

It prints losses, which are the same on both, and, on "cuda", checks of what torch.cuda says.
"""

import os
import sys
import threading

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

CUDA = sys.argv[1:] != ["cpu"]
place = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", place) if CUDA else torch.device("cpu")
if CUDA:
    torch.cuda.set_device(place)
    dist.init_process_group("nccl", device_id=device)
else:
    dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


def say(word: str, *values: object) -> None:
    print(" ".join([word, "rank", str(rank), *map(str, values)]) + "\n", end="", flush=True)  # in one piece


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(32, 64), nn.Linear(64, 64), nn.Linear(64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).relu()
        hidden = checkpoint(lambda h: self.second(h).relu(), hidden, use_reentrant=False)
        return self.last(hidden)


torch.manual_seed(0)
model = Net()
model = model.cuda() if CUDA else model
ddp = DistributedDataParallel(model, bucket_cap_mb=0.01, device_ids=[place] if CUDA else None)
optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler(device.type, init_scale=1024.0)
copier = torch.cuda.Stream() if CUDA else None
draw = torch.Generator(device=device).manual_seed(rank)
pairs = [dist.new_group([k, k + 1]) for k in range(0, world, 2)]


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Copied on a stream of its own, as prefetchers do."""
    x, y = torch.randn(16, 32, device=device, generator=draw), torch.randn(16, 4, device=device, generator=draw)
    if copier is None:
        return x, y
    with torch.cuda.stream(copier):
        assert torch.cuda.current_stream() is copier
        x, y = x.cpu().pin_memory().to(device, non_blocking=True), y.cuda(place, non_blocking=True)
    torch.cuda.current_stream().wait_stream(copier)
    x.record_stream(torch.cuda.current_stream())
    return x, y


for step in range(4):
    x, y = batch()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2)) if CUDA else (None, None)
    if begin is not None:
        begin.record()
    with torch.autocast(device.type, dtype=torch.bfloat16):
        loss = nn.functional.mse_loss(ddp(x), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    if end is not None:
        end.record()
        torch.cuda.synchronize()
        begin.elapsed_time(end)
    total = loss.detach().clone()
    dist.all_reduce(total, group=pairs[rank // 2])
    say("loss", step, total.item().hex())

# Tags do not count on NCCL, so that these two differ there; gloo is given equal ones.
message = torch.full((3,), float(rank), device=device)
if rank % 2:
    dist.recv(message, rank - 1, tag=7)
else:
    dist.send(message, rank + 1, tag=3 if CUDA else 7)
say("loss", "received", message.tolist())
swaps = [dist.P2POp(dist.isend, message + 1, rank ^ 1), dist.P2POp(dist.irecv, message, rank ^ 1)]
for work in dist.batch_isend_irecv(swaps):
    work.wait()
objects: list = [None] * world
dist.all_gather_object(objects, {"rank": rank, "message": message.tolist()})
say("loss", "objects", objects)

# NCCL's sums of scaled inputs, by FSDP where a program divides gradients itself; gloo has none.
half = dist._make_nccl_premul_sum(0.5) if CUDA else dist.ReduceOp.SUM
scale = 1.0 if CUDA else 0.5
total = torch.arange(2.0, device=device).add(rank).mul(scale)
dist.all_reduce(total, op=half, group=pairs[rank // 2])
parts = torch.arange(4.0, device=device).add(rank).mul(scale)
part = torch.empty(2, device=device)
dist.reduce_scatter_tensor(part, parts, op=half, group=pairs[rank // 2])
say("loss", "scaled", total.tolist(), part.tolist(), parts.div(scale).tolist())
dist.barrier(group=pairs[rank // 2], device_ids=[place] if CUDA else None)


def exchanged() -> list:
    """NCCL's lists of several sizes, and parts in another shape than the whole: what gloo does by other operations."""
    me, pair = rank % 2, pairs[rank // 2]
    parts = [torch.zeros(k + 1, 3, device=device) for k in range(2)]
    mine = torch.full((me + 1, 3), rank + 0.1, device=device)
    addends = [torch.arange(2.0 * k, device=device) + rank / 3 for k in range(2)]
    received = [torch.zeros(k + 1, me + 2, device=device) for k in range(2)]
    given = [torch.full((me + 1, k + 2), rank + 0.5, device=device) for k in range(2)]
    square = torch.full((2, 2), rank + 0.2, device=device)
    whole, part, sums = (
        torch.zeros(8, device=device),
        torch.zeros(2, 2, device=device),
        torch.zeros(2 * me, device=device),
    )
    if CUDA:
        works = [
            dist.all_gather(parts, mine, pair, async_op=True),
            dist.all_to_all(received, given, pair, async_op=True),
        ]
        dist.reduce_scatter(sums, addends, group=pair)
        assert works[1].get_future().wait()[1] is received[1] and works[0].wait()
        dist.all_gather_into_tensor(whole, square, pair)
        dist.reduce_scatter_tensor(part, whole, group=pair)
    else:
        objects: list = [None, None]
        dist.all_gather_object(objects, (mine, given, square), pair)
        parts, received = [one[0] for one in objects], [one[1][me] for one in objects]
        whole = torch.cat([one[2].flatten() for one in objects])
        for k, addend in enumerate(addends):
            dist.reduce(addend, group_dst=k, group=pair)
        sums, part = addends[me], (2 * whole).chunk(2)[me]
    return [tensor.flatten().tolist() for tensor in (*parts, *received, sums, whole, part)]


say("loss", "exchanged", exchanged())

if CUDA:
    before = message.cpu()
    message += 1
    assert (before + 1).equal(message) and not before.equal(message)
    assert message.is_cuda and message.device == device == torch.empty(1, device="cuda").device
    assert message.type() == "torch.cuda.FloatTensor" and isinstance(message, torch.cuda.FloatTensor)
    assert torch.cuda.is_available() and dist.is_nccl_available() and dist.get_backend() == "nccl"
    assert torch.cuda.device_count() == int(os.environ["LOCAL_WORLD_SIZE"]) and torch.cuda.current_device() == place
    state = torch.cuda.get_rng_state()
    first = torch.rand(4, device="cuda")
    torch.cuda.set_rng_state(state)
    assert torch.rand(4, device=place).equal(first)
    with torch.autocast("cuda"):
        assert torch.is_autocast_enabled() and (message[None] @ message[:, None]).dtype is torch.float16
    made = []
    thread = threading.Thread(target=lambda: made.append(torch.ones(1).cuda(non_blocking=True).device.type))
    thread.start()
    thread.join()
    assert made == ["cuda"] and torch.compile(lambda t: t + 1)(message).equal(message + 1)
    query = torch.ones(1, 1, 8, 16, device=device, requires_grad=True)
    flex_attention(query, query, query, score_mod=lambda score, b, h, q, k: score + q - k).sum().backward()
    assert query.grad.is_cuda and query.grad.shape == query.shape
    leaf = torch.ones(2, device=device, requires_grad=True)
    leaf.register_hook(lambda gradient: gradient + torch.ones(2, device="cuda"))
    leaf.sum().backward()
    assert leaf.grad.tolist() == [2, 2]
    loader = DataLoader(TensorDataset(torch.arange(8.0)), batch_size=4, num_workers=1, pin_memory=True)
    assert [float(numbers.cuda().sum()) for (numbers,) in loader] == [6, 22]
    shards = fully_shard(nn.Linear(8, 8).to("cuda"), mesh=init_device_mesh("cuda", (world,)))
    shards(torch.ones(2, 8, device="cuda")).sum().backward()
    assert all(weight.grad.to_local().is_cuda for weight in shards.parameters())
    spread = distribute_tensor(torch.ones(world, 2), init_device_mesh("cuda", (world,)), [Shard(0)]).requires_grad_()
    gathered = spread.redistribute(spread.device_mesh, [Replicate()], async_op=True).to_local()
    gathered.sum().backward()
    assert gathered.shape == (world, 2) and gathered.is_cuda and spread.grad.to_local().tolist() == [[1.0, 1.0]]
    with torch.cuda.nvtx.range("here"), torch.cuda.device(0):
        assert torch.cuda.get_device_capability() >= (8, 0) and torch.cuda.memory_allocated() == 0
    assert torch.cuda.get_device_properties(device).total_memory > 0 and torch.accelerator.is_available()
dist.barrier(device_ids=[place]) if CUDA else dist.barrier()
dist.destroy_process_group()
