"""What valid programs also do: second lives of groups, threads, polling, futures, hooks, files left open; prints what it sees."""

import os
import sys
import threading

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
pairs = [dist.new_group([first, first + 1]) for first in range(0, world, 2)]
mine = pairs[rank // 2]


def check(name, value):
    print(f"check rank {rank} {name} {value}\n", end="", flush=True)


def reduced(group=None):
    tensor = torch.full((2,), float(rank))
    return tensor, dist.all_reduce(tensor, group=group, async_op=True)


tensor, work = reduced(mine)
thread = threading.Thread(target=work.wait)
thread.start()
thread.join()
check("waited by another thread", tensor[0].item())

tensor, work = reduced(mine)
dist.all_reduce(torch.ones(1), group=mine)
future = work.get_future()
check("future after another wait", future.wait()[0][0].item())

tensor, work = reduced(mine)
while not work.is_completed():
    pass
check("polled work", tensor[0].item())

tensor, work = reduced(mine)
future = work.get_future()
while not future.done():
    pass
check("polled future", tensor[0].item())
check("then", work.get_future().then(lambda done: done.value()[0] * 2).wait()[0].item())

store = dist.distributed_c10d._get_default_store()
store.set(f"here{rank}", "1")
while not store.check([f"here{other}" for other in range(world)]):
    pass
try:
    store.set(f"word{rank}", "abc")
    store.add(f"word{rank}", 1)
except RuntimeError:
    check("bad add", "refused")

torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 2), process_group=mine, static_graph=True)
model.register_comm_hook(mine, allreduce_hook)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    optimizer.zero_grad()
    model(torch.full((1, 4), float(rank))).sum().backward()
    optimizer.step()
check("hook", model.module.weight.sum().item().hex())

source = torch.zeros(1)
if rank % 2:
    dist.send(torch.full((1,), float(rank)), rank - 1, group=mine)
else:
    check("any source", (dist.recv(source, group=mine), source.item()))

if len(sys.argv) > 1:
    left_open = open(os.path.join(sys.argv[1], f"rank{rank}"), "w")  # noqa: SIM115 - Python flushes it at exit
    left_open.write("flushed")
dist.barrier()
dist.destroy_process_group()
