"""The program that tests/bench/live.py measures: a plain GPT under each kind of parallelism, with delays on demand.

    torchrun --standalone --nproc-per-node 2 tests/bench/live_gpt.py --mode fsdp --delay 0:12:5:gpu+1:6:5:host

Iteration k has delay class k % (classes + 1), counted from the program's first iteration; class 0 has no delay.
"""

import argparse
import contextlib
import faulthandler
import json
import os
import resource
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from live_delay import Delays, Idle, Spin
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

MODES = ("ddp", "fsdp", "tp", "1f1b", "interleaved", "3d", "moe", "hostbound")
PIPELINES = {"1f1b": 1, "interleaved": 2, "3d": 1}  # stages of a rank
QUIET = ("ddp", "fsdp", "hostbound", "1f1b", "interleaved")
SIZES = {
    "cuda": {"layers": 24, "dim": 2048, "heads": 16, "vocab": 32768, "seq": 2048},
    "cpu": {"layers": 4, "dim": 64, "heads": 4, "vocab": 128, "seq": 32},
}
BATCH = {"1f1b": 16, "interleaved": 16, "3d": 16, "hostbound": 1}  # else 4
LOCAL_EXPERTS = 2  # of a rank, in every second layer
BUCKET = 25 << 20  # bytes of gradients in one all-reduce of --mode moe


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--mode", choices=MODES, default="ddp")
    add("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    for name in ("layers", "dim", "heads", "vocab", "seq"):
        add(f"--{name}", type=int, help="(default: by device)")
    add(
        "--batch",
        type=int,
        help="sequences of a rank and step; of a replica's ranks for tp and pipelines (default: by mode)",
    )
    add("--microbatches", type=int, default=8, help="parts of a batch in a pipeline")
    add("--expert-parallel", type=int, metavar="N", help="ranks that a layer's experts are spread over (default: all)")
    add("--steps", type=int, default=12)
    add("--log-every", type=int, default=1, metavar="N", help="loss.item() every N steps; 0: never")
    add("--sync", action=argparse.BooleanOptionalAction, default=True, help="synchronize at both ends of a step")
    add("--quiet", action="store_true", help="spin instead of computing, with the same communication")
    add("--quiet-ms", type=float, help="spin of a block's forward (default: 2 on cuda, 0.5 on cpu)")
    add("--delay", default="", metavar="SPEC", help="classes joined by +, each RANK:LAYER:MS:gpu|host joined by commas")
    add("--profile", action="store_true", help="run all steps under torch.profiler")
    add("--eager", action="store_true", help="initialise NCCL with a device id")
    add("--lr", type=float, default=1e-4)
    add("--seed", type=int, default=0)
    add("--limit", type=float, default=300, metavar="S", help="seconds after which to print all stacks and exit")
    args = parser.parse_args()
    sizes = SIZES[args.device] | ({"seq": SIZES[args.device]["seq"] // 16 or 1} if args.mode == "hostbound" else {})
    for name, size in sizes.items():
        setattr(args, name, getattr(args, name) or size)
    args.batch = args.batch or BATCH.get(args.mode, 4)
    args.quiet_ms = args.quiet_ms or (2.0 if args.device == "cuda" else 0.5)
    if args.quiet and args.mode not in QUIET:
        parser.error(f"--quiet: one of the modes {', '.join(QUIET)}")
    return args


@dataclass
class Job:
    """What every part of the model needs to know."""

    args: argparse.Namespace
    device: torch.device
    rank: int
    world: int
    spin: Spin
    delays: Delays
    mesh: DeviceMesh

    def seed(self, number):
        torch.manual_seed(1000 * (self.args.seed + 1) + number)

    def idle(self, x, module, share):
        """Spin for `share` of the usual time in place of `module`; ranks differ by 10 %."""
        pipeline = self.args.microbatches if self.args.mode in PIPELINES else 1
        ms = self.args.quiet_ms * share * (1 + 0.1 * self.rank) / pipeline
        return Idle.apply(x, self.spin, ms, *module.parameters())


def new_mesh(args, device, world):
    """The ranks by dimension: "pp" and "tp" that the mode asks for ("ep" with moe), "dp" the rest. 3d: as many twos as fit."""
    pp = tp = ep = 1
    if args.mode == "3d":
        tp, pp = (2 if world % 2 == 0 else 1), (2 if world % 4 == 0 else 1)
    elif args.mode in PIPELINES:
        pp = world
    elif args.mode == "tp":
        tp = world
    elif args.mode == "moe":
        ep = args.expert_parallel or world
    inner, name = (ep, "ep") if args.mode == "moe" else (tp, "tp")
    if world % (pp * inner):
        raise SystemExit(f"live_gpt.py: {world} ranks cannot be split by {pp * inner}")
    return init_device_mesh(device.type, (pp, world // pp // inner, inner), mesh_dim_names=("pp", "dp", name))


class MLP(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.up = nn.Linear(dim, 4 * dim, bias=False)
        self.down = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class MoE(nn.Module):
    """Experts spread over the mesh's "ep". Tokens take turns, so that every expert gets the same number; the router weighs."""

    def __init__(self, job, index):
        super().__init__()
        dim = job.args.dim
        self.group = job.mesh.get_group("ep")
        self.ranks = self.group.size()
        self.experts_of_all = LOCAL_EXPERTS * self.ranks
        self.router = nn.Linear(dim, self.experts_of_all, bias=False)
        job.seed(100 * index + 10 * (self.group.rank() + 1))
        self.experts = nn.ModuleList(MLP(dim) for _ in range(LOCAL_EXPERTS))

    def exchange(self, rows):
        return all_to_all_single_autograd(rows.contiguous(), None, None, self.group)

    def forward(self, x):
        tokens, count = x.flatten(0, 1), self.experts_of_all
        rows = tokens.unflatten(0, (-1, count)).transpose(0, 1).flatten(0, 1)  # by expert
        arrived = self.exchange(rows).view(self.ranks, LOCAL_EXPERTS, -1, x.shape[-1])
        done = torch.stack([expert(arrived[:, i]) for i, expert in enumerate(self.experts)], 1)
        back = self.exchange(done.view_as(rows)).view(count, -1, x.shape[-1]).transpose(0, 1).flatten(0, 1)
        gates = self.router(tokens).softmax(-1).unflatten(0, (-1, count)).diagonal(dim1=1, dim2=2)
        return (back * gates.reshape(-1, 1)).view_as(x)


class Attention(nn.Module):
    """Causal attention; the rows of `qkv` lie by head, so that ranks can split it by rows."""

    def __init__(self, dim, heads):
        super().__init__()
        self.width = dim // heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (-1, 3, self.width)).transpose(1, 3).unbind(1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, job, index):
        super().__init__()
        dim = job.args.dim
        job.seed(100 * index)
        self.job, self.index = job, index
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = Attention(dim, job.args.heads)
        self.mlp = MoE(job, index) if job.args.mode == "moe" and index % 2 else MLP(dim)

    def forward(self, x):
        if self.job.args.quiet:
            return self.job.delays.at(self.job.idle(x, self, 1 + 0.3 * (self.index % 3)), self.index)
        x = x + self.attention(self.norm1(x))
        x = self.job.delays.at(x, self.index)
        return x + self.mlp(self.norm2(x))


class Embedding(nn.Module):
    def __init__(self, job):
        super().__init__()
        job.seed(98)
        self.job = job
        self.token = nn.Embedding(job.args.vocab, job.args.dim)
        self.position = nn.Parameter(0.02 * torch.randn(job.args.seq, job.args.dim))

    def forward(self, tokens):
        if self.job.args.quiet:
            x = torch.zeros(*tokens.shape, self.job.args.dim, dtype=self.position.dtype, device=tokens.device)
            return self.job.idle(x, self, 0.1)
        return self.token(tokens) + self.position


class Head(nn.Module):
    """Logits; a quiet job's hidden state."""

    def __init__(self, job):
        super().__init__()
        job.seed(99)
        self.job = job
        self.norm = nn.LayerNorm(job.args.dim)
        self.logits = nn.Linear(job.args.dim, job.args.vocab, bias=False)

    def forward(self, x):
        return self.job.idle(x, self, 0.5) if self.job.args.quiet else self.logits(self.norm(x))


def cross_entropy(logits, target):
    return F.cross_entropy(logits.flatten(0, 1).float(), target.flatten())


def mean(hidden, target):
    """What a quiet job takes for its loss."""
    return hidden.float().mean()


def build(job, stage=0, stages=1):
    """Pipeline stage `stage` of `stages`; its weights depend on the seed and the layer alone."""
    args = job.args
    first, end = args.layers * stage // stages, args.layers * (stage + 1) // stages
    with job.device:
        modules = [Embedding(job)] if stage == 0 else []
        modules += [Block(job, index) for index in range(first, end)]
        return nn.Sequential(*modules, *([Head(job)] if stage == stages - 1 else []))


def apply_tp(model, job):
    """Split attention heads, hidden units and vocabulary over the mesh's "tp"; everything between stays replicated."""
    mesh = job.mesh["tp"]
    column, row = ColwiseParallel(), RowwiseParallel()
    for module in model:
        if isinstance(module, Embedding):
            plan = {"token": RowwiseParallel(input_layouts=Replicate())}
        elif isinstance(module, Head):
            plan = {"logits": ColwiseParallel(output_layouts=Replicate())}
        else:
            plan = {"attention.qkv": column, "attention.out": row, "mlp.up": column, "mlp.down": row}
        parallelize_module(module, mesh, plan)
    return model


def average(parameters, group):
    """Average gradients over ``group``, in buckets."""
    if group.size() == 1:
        return
    bucket, size = [], 0
    for parameter in reversed(parameters):
        grad = parameter.grad
        bucket.append(grad.to_local() if isinstance(grad, DTensor) else grad)
        size += bucket[-1].nbytes
        if size >= BUCKET or parameter is parameters[0]:
            flat = torch.cat([grad.flatten() for grad in bucket])
            dist.all_reduce(flat, group=group)
            parts = flat.div_(group.size()).split([grad.numel() for grad in bucket])
            torch._foreach_copy_(bucket, [part.view_as(grad) for part, grad in zip(parts, bucket, strict=True)])
            bucket, size = [], 0


class Whole:
    """A model that every rank runs as a whole: its forward, its backward, and what follows."""

    def __init__(self, job):
        self.job, mode = job, job.args.mode
        self.loss_fn = mean if job.args.quiet else cross_entropy
        model = build(job)
        if mode in ("fsdp", "hostbound"):
            for module in model:
                fully_shard(module, mesh=job.mesh["dp"])
            fully_shard(model, mesh=job.mesh["dp"])
        self.model = apply_tp(model, job) if mode == "tp" else model
        if mode == "ddp":
            self.model = DistributedDataParallel(model, [job.device.index] if job.device.type == "cuda" else None)
        self.shared = [p for name, p in model.named_parameters() if ".experts." not in name] if mode == "moe" else []
        self.experts = [p for name, p in model.named_parameters() if ".experts." in name]
        self.replica = job.mesh.get_local_rank("dp") if mode == "tp" else job.rank

    def parameters(self):
        return list(self.model.parameters())

    def step(self, tokens, target):
        loss = self.loss_fn(self.model(tokens), target)
        loss.backward()
        if self.shared:
            average(self.shared, dist.group.WORLD)
            average(self.experts, self.job.mesh.get_group("dp"))
            torch._foreach_div_(
                [p.grad for p in self.experts], self.job.mesh.size(2)
            )  # the sum over "ep" has come already
        return loss.detach()


class Pipeline:
    """The stages of this rank under a schedule; 3d: split over "tp" too, gradients averaged over "dp"."""

    def __init__(self, job):
        args, self.job = job.args, job
        self.place, self.depth = job.mesh.get_local_rank("pp"), job.mesh.size(0)
        self.replica, self.group = job.mesh.get_local_rank("dp"), job.mesh.get_group("dp")
        count = PIPELINES[args.mode] * self.depth
        stages = [self.stage(job, index, count) for index in range(self.place, count, self.depth)]
        self.modules = nn.ModuleList(stage.submod for stage in stages)
        loss_fn = mean if args.quiet else cross_entropy
        if args.mode == "1f1b":
            self.schedule = Schedule1F1B(stages[0], args.microbatches, loss_fn=loss_fn)
        else:
            self.schedule = ScheduleInterleaved1F1B(stages, args.microbatches, loss_fn=loss_fn)

    @staticmethod
    def stage(job, index, count):
        """Shapes are given: inferring them would communicate in the first step."""
        args = job.args
        rows, dtype = args.batch // args.microbatches, torch.get_default_dtype()
        tokens = torch.empty(rows, args.seq, dtype=torch.int64)
        hidden = torch.empty(rows, args.seq, args.dim, dtype=dtype, requires_grad=True)
        logits = hidden if args.quiet else torch.empty(rows, args.seq, args.vocab, dtype=dtype, requires_grad=True)
        shapes = [tokens, *[hidden] * (count - 1), logits]
        given = {"input_args": shapes[index].to(job.device), "output_args": shapes[index + 1].to(job.device)}
        model = build(job, index, count)
        if job.mesh.size(2) > 1:
            apply_tp(model, job)
        return PipelineStage(model, index, count, job.device, **given, group=job.mesh.get_group("pp"))

    def parameters(self):
        return list(self.modules.parameters())

    def step(self, tokens, target):
        losses = []
        first, last = self.place == 0, self.place == self.depth - 1
        self.schedule.step(*([tokens] if first else []), **({"target": target, "losses": losses} if last else {}))
        average(self.parameters(), self.group)
        return torch.stack(losses).mean().detach() if losses else None


def new_optimizer(parameters, args):
    """Fused kernels take sharded and plain parameters, but not in one list."""
    sharded = [p for p in parameters if isinstance(p, DTensor)]
    plain = [p for p in parameters if not isinstance(p, DTensor)]
    groups = [{"params": group} for group in (sharded, plain) if group]
    return torch.optim.AdamW(groups, lr=args.lr, fused=args.device == "cuda", foreach=False)


def next_batch(args, generator, device):
    """Sequences that climb by one or two tokens a place, and the same shifted by one."""
    start = torch.randint(args.vocab, (args.batch, 1), generator=generator)
    climb = torch.randint(1, 3, (args.batch, args.seq), generator=generator).cumsum(1)
    text = (torch.cat([start, start + climb], 1) % args.vocab).to(device)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def train(job):
    """Run all steps; returns what the RES line tells."""
    args = job.args
    synchronize = torch.cuda.synchronize if args.sync and job.device.type == "cuda" else lambda: None
    torch.set_default_dtype(torch.bfloat16 if job.device.type == "cuda" else torch.float32)
    model = (Pipeline if args.mode in PIPELINES else Whole)(job)
    parameters = model.parameters()
    optimizer = new_optimizer(parameters, args)
    generator = torch.Generator().manual_seed(args.seed + 1 + model.replica)
    times, value = [], None
    synchronize()
    began = time.perf_counter()
    for step in range(args.steps):
        job.delays.begin(step)
        loss = model.step(*next_batch(args, generator, job.device))
        optimizer.step()
        optimizer.zero_grad()
        if loss is not None and args.log_every and (step + 1) % args.log_every == 0:
            value = loss.item()
        synchronize()
        ended = time.perf_counter()  # the next step begins here: all the loop's time belongs to a step
        times.append(round(1e3 * (ended - began), 4))
        began = ended
    on_gpu = job.device.type == "cuda"
    peak = torch.cuda.max_memory_allocated() if on_gpu else 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "rank": job.rank,
        "mode": args.mode,
        "parameters": sum(p.numel() for p in parameters),
        "step_ms": times,
        "peak_bytes": peak,
        "loss": None if value is None else value.hex(),
        "torch": torch.__version__,
        "card": torch.cuda.get_device_name() if on_gpu else "CPU",
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if on_gpu else "",
    }


def profiler(args):
    if not args.profile:
        return contextlib.nullcontext()
    kinds = torch.profiler.ProfilerActivity
    return torch.profiler.profile(activities=[kinds.CPU, *([kinds.CUDA] if args.device == "cuda" else [])])


def main():
    args = parse_args()
    faulthandler.dump_traceback_later(args.limit, exit=True)
    device = torch.device("cpu")
    if args.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)  # the ranks share the cores
    eager = {"device_id": device} if args.eager and args.device == "cuda" else {}
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo", **eager)
    rank, spin = dist.get_rank(), Spin(device)
    world = dist.get_world_size()
    job = Job(args, device, rank, world, spin, Delays(args.delay, rank, spin), new_mesh(args, device, world))
    with profiler(args):
        result = train(job)
    # One write: torchrun's children share standard output, and print would write the newline apart.
    print(f"RES {json.dumps(result)}\n", end="", flush=True)
    dist.barrier()  # or a gloo thread may still free a tensor while Python shuts down, and abort
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
