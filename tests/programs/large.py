"""Operations of every kind on payloads above 64 KiB, in a world of four; sums are exact in any order (whole numbers)."""

import zlib

import torch
import torch.distributed as dist

SIZE = 20_000
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
source = torch.Generator().manual_seed(rank)


def mine(count=SIZE):
    return torch.randint(-1000, 1000, (count,), generator=source).float()


def check(name, *tensors):
    total = zlib.crc32(b"".join(tensor.numpy().tobytes() for tensor in tensors))
    print(f"check rank {rank} {name} {total:08x}\n", end="", flush=True)


pairs = [dist.new_group([0, 3]), dist.new_group([1, 2])]
for step in range(2):
    summed, halves = mine(), mine()
    dist.all_reduce(summed)
    dist.all_reduce(halves, group=pairs[rank in (1, 2)])
    check(f"all_reduce {step}", summed, halves)
    for root in range(world):
        told, total = mine(), mine()
        dist.broadcast(told, root)
        dist.reduce(total, root)
        parts = [torch.zeros(SIZE) for _ in range(world)]
        dist.gather(mine(), parts if rank == root else None, root)
        piece = torch.zeros(SIZE)
        dist.scatter(piece, [mine() for _ in range(world)] if rank == root else None, root)
        check(f"root {root} {step}", told, piece, *([total, *parts] if rank == root else []))
    gathered = [torch.zeros(SIZE) for _ in range(world)]
    dist.all_gather(gathered, mine())
    swapped = torch.zeros(world * SIZE)
    dist.all_to_all_single(swapped, mine(world * SIZE))
    check(f"all {step}", swapped, *gathered)
    got = torch.zeros(SIZE)
    works = [dist.isend(mine(), (rank + 1) % world), dist.irecv(got, (rank - 1) % world)]
    for work in works:
        work.wait()
    check(f"ring {step}", got)
