"""A program that starts its ranks itself, as tutorials do: mp.spawn(train, nprocs=…); each rank starts two helpers of its own."""

import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def helper(k, queue):
    queue.put(k + torch.ones(2).sum().item())


def train(rank, world, power):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", sys.argv[2]
    dist.init_process_group("gloo", rank=rank, world_size=world)
    queue = mp.get_context("spawn").SimpleQueue()
    mp.spawn(helper, (queue,), nprocs=2)
    value = torch.tensor([queue.get() + queue.get()]) + rank**power
    dist.all_reduce(value)
    print(f"check rank {rank} {value.item()}\n", end="", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    world = int(sys.argv[1])
    mp.spawn(train, args=(world, 2), nprocs=world)
