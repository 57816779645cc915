"""Four ranks: ranks 0 and 2 take two groups in opposite order, so neither ever returns."""

from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
left, right = (dist.new_group(ranks, timeout=timedelta(seconds=20)) for ranks in ([0, 1, 2], [0, 2, 3]))
dist.all_reduce(torch.ones(4))
for group in {0: [left, right], 1: [left], 2: [right, left], 3: [right]}[rank]:
    dist.all_reduce(torch.ones(8), group=group)
dist.destroy_process_group()
