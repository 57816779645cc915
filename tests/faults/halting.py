"""Sums over all ranks; if there is a named pipe `gate` in its folder, rank 0 writes `ready` into it and stops for good."""

import os
import signal

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(4))
if dist.get_rank() == 0 and os.path.exists("gate"):
    with open("gate", "w") as gate:
        gate.write("ready\n")
    while True:
        signal.pause()
dist.all_reduce(torch.ones(4))
dist.destroy_process_group()
