"""What is set up before ranks are forked leaves nothing that a program could see, and ranks can train afterwards."""

import json
import subprocess
import sys

import pytest
import torch

from tests.tools import environment

SCRIPT = """
import json, os
import torch, torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import _random
from prism_tools.capture import ranks, warm
before = {name: repr(value) for name, value in vars(distributed_c10d._world).items()}
failed = warm.warm_up()
ranks.preload(warm=True)
after = {name: repr(value) for name, value in vars(distributed_c10d._world).items()}
names = [open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task")]
threads = sum(not name.startswith("cuda") for name in names)  # where devices are counted, their driver has one
reads, writes = os.pipe()
if not os.fork():  # a rank
    weight = torch.ones(2, requires_grad=True)
    (weight * 3).sum().backward()
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=4)
    group = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["b"].get_group()
    os.write(writes, json.dumps([weight.grad.tolist(), group.group_name]).encode())
    os._exit(0)
rank = json.loads(os.read(reads, 1000))
failed = [str(problem) for problem in failed]
print(json.dumps([failed, before == after, threads, dist.is_initialized(), _random._rng_tracker is None, rank]))
"""
FRESH = """
import json
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg
from torch.distributed.device_mesh import init_device_mesh
dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=4)
print(json.dumps(init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["b"].get_group().group_name))
"""


def printed(script):
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment(OMP_NUM_THREADS="1"),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def test_every_kind_of_model_runs_nothing_is_left_and_a_rank_trains():
    name = printed(FRESH)
    assert printed(SCRIPT) == [[], True, 1, False, True, [[3.0, 3.0], name]]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_ranks_can_use_devices_that_the_parent_has_only_counted(bench):
    """A backward pass asks for devices, on the CPU too; in a fork that fails if the parent has asked the CUDA runtime."""
    (bench.out / "train.py").write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "weight = torch.ones(3, requires_grad=True)\n"
        "(weight * 2).sum().backward()\n"
        "print(f'check rank {dist.get_rank()} {weight.grad.tolist()} {(weight.cuda() + 1).sum().item()}', flush=True)\n"
    )
    done = bench.run("record", "-n", 2, "-o", "run.h5", "--", "train.py")
    assert done.lines("check") == [f"check rank {rank} [2.0, 2.0, 2.0] 6.0" for rank in range(2)]
