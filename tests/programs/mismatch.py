"""At the second operation rank 2 calls barrier where the others call all_reduce."""

from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
dist.all_reduce(torch.ones(4))
if dist.get_rank() == 2:
    dist.barrier()
else:
    dist.all_reduce(torch.ones(4))
dist.destroy_process_group()
