"""Torch's first use of everything, once, before ranks are forked: what it sets up then is memory that all of them share.

A page that a rank touches for the first time becomes the rank's own: reference counts lie beside objects, and the interpreter
rewrites code while it runs for the first times.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import warnings
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate, _random
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

STEPS = 5  # code that ran a few times is rewritten no more
WIDTH, TOKENS = 8, 4


class _Block(nn.Module):
    """A little of what models are made of: float[batch, tokens, WIDTH] → the same."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.norm(x).unflatten(-1, (2, -1)).transpose(1, 2)
        mixed = nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        return x + self.down(nn.functional.gelu(self.up(mixed.transpose(1, 2).flatten(2))))


class _Model(nn.Module):
    """Classes of tokens that it does not look at: float[2, TOKENS, WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.block, self.head = nn.Embedding(WIDTH, WIDTH), _Block(), nn.Linear(WIDTH, WIDTH)

    def forward(self, _: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.token(torch.zeros(2, TOKENS, dtype=torch.long))))


def warm_up() -> list[Exception]:
    """Train small models of the usual kinds in this process, among ranks that do not exist, and forget them.

    Leaves no thread and no state behind but torch's backend "fake", registered. Returns what failed, which costs memory and
    nothing else.
    """
    tracker = _random._rng_tracker
    failed: list[Exception] = []
    with warnings.catch_warnings(), _kept(failed):
        warnings.simplefilter("ignore")
        if _has_devices():  # its backward starts threads, which a fork would leave behind
            with torch.no_grad():
                _Block()(torch.ones(2, TOKENS, WIDTH))
        else:
            importlib.import_module("torch.testing._internal.distributed.fake_pg")  # registers the backend
            dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=8)
            try:
                mesh = init_device_mesh("cpu", (1, 2, 4), mesh_dim_names=("pp", "dp", "tp"))
                for kind in (_replicated, _split, _sharded, _pipelined):
                    with _kept(failed):
                        kind(mesh)
            finally:
                dist.destroy_process_group()
    _random._rng_tracker = tracker
    return failed


def _has_devices() -> bool:
    """Asked of the driver's library: the CUDA runtime, once it is asked, works in no forked process any more."""
    before = os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK")
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    try:
        return torch.cuda.is_available()
    finally:
        del os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"]
        if before is not None:
            os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = before


@contextlib.contextmanager
def _kept(failed: list[Exception]) -> Iterator[None]:
    try:
        yield
    except Exception as problem:  # of a torch that does something else here: recording must go on
        failed.append(problem)


def _train(model: nn.Module, optimizers: tuple[type[torch.optim.Optimizer], ...]) -> None:
    for kind in optimizers:
        optimizer = kind(model.parameters(), lr=0.1)
        for _ in range(STEPS):
            out = model(nn.functional.embedding(torch.zeros(2, TOKENS, dtype=torch.long), torch.ones(3, WIDTH)))
            loss = nn.functional.cross_entropy(out.flatten(0, 1), torch.zeros(2 * TOKENS, dtype=torch.long))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        loss.item()


def _replicated(mesh: DeviceMesh) -> None:
    replica = DistributedDataParallel(_Block(), process_group=mesh["dp"].get_group())
    with replica.no_sync():  # its C++ would miss the results of operations that were none
        _train(replica, (torch.optim.SGD, torch.optim.AdamW))


def _split(mesh: DeviceMesh) -> None:
    plan = {
        "token": RowwiseParallel(input_layouts=Replicate()),
        "block.up": ColwiseParallel(),
        "block.down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    _train(parallelize_module(_Model(), mesh["tp"], plan), (torch.optim.AdamW,))


def _sharded(mesh: DeviceMesh) -> None:
    model = nn.Sequential(_Block(), _Block())
    for module in (*model, model):
        fully_shard(module, mesh=mesh["dp"])
    _train(model, (torch.optim.AdamW,))


def _pipelined(mesh: DeviceMesh) -> None:
    """One stage: what were received from a rank that is not there would be garbage."""
    stage = PipelineStage(_Block(), 0, 1, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
    for _ in range(STEPS):
        schedule.step(torch.ones(8, TOKENS, WIDTH), target=torch.ones(8, TOKENS, WIDTH))
