"""The default rendezvous store used directly: all its operations, a prefix, a clone, and waits with a time limit."""

from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
store = _get_default_store()


def check(name, value):
    print(f"check rank {rank} {name} {value.hex()}\n", end="", flush=True)


store.set(f"name{rank}", f"rank {rank}")
check("get", store.get(f"name{(rank + 1) % world}"))

keys = [f"name{other}" for other in range(world)]
store.wait(keys, timedelta(seconds=60))
check("check", bytes([store.check(keys), store.check(["nobody sets this"])]))

store.add("sum", rank + 1)
if store.add("arrived", 1) == world:
    store.set("all", "here")
store.wait(["all"])
check("add", bytes([store.add("sum", 0)]))

if rank == 0:
    store.compare_set("choice", "", "first")
    store.set("chosen", "yes")
store.wait(["chosen"])
check("compare_set", store.compare_set("choice", "other", "second"))

prefixed = dist.PrefixStore("mine", store)
prefixed.set(str(rank), "x" * rank)
check("prefix", prefixed.get(str((rank + 1) % world)))

dist.PrefixStore("queues", store).queue_push(str((rank + 1) % world), f"from {rank}")
queues = dist.PrefixStore("queues", store.clone())
check("queue_pop", queues.queue_pop(str(rank)))
check("queue_len", bytes([queues.queue_len(str(rank))]))
try:
    queues.queue_pop(str(rank), False)
except dist.QueueEmptyError as error:
    check("empty", str(error).encode())

store.barrier("here", world)
check("list_keys", " ".join(sorted(prefixed.list_keys())).encode())
check("num_keys", bytes([store.num_keys() > 9]))

try:
    store.wait(["never"], timedelta(milliseconds=50))
except dist.DistStoreError as error:
    check("expired", str(error).partition(",")[0].encode())
if rank == world - 1:
    store.set("late", "here")
while True:
    try:
        store.wait(["late"], timedelta(milliseconds=50))
        break
    except dist.DistStoreError:
        pass
check("late", store.get("late"))
dist.barrier()
dist.destroy_process_group()
