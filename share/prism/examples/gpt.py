"""Train a small GPT on synthetic text with tensor, pipeline, data and expert parallelism.

Run it with torchrun; the data-parallel size is what tp and pp leave of the world:

    torchrun --standalone --nproc-per-node 8 gpt.py --tp 2 --pp 2 --steps 4
    torchrun --standalone --nproc-per-node 4 gpt.py --pp 2 --shard fsdp2 --ep 2 --moe 4
    torchrun --standalone --nproc-per-node 4 gpt.py --pp 2 --pace 8

Every rank prints `time rank R step K MILLISECONDS` from its own step timer; ranks of the last
pipeline stage also print `loss rank R step K HEXFLOAT`. With --pace the blocks sleep instead of
computing, unevenly, so that many ranks on few cores still overlap as they would on a cluster.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small GPT on synthetic text.")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel size (default: 1)")
    parser.add_argument("--pp", type=int, default=1, help="pipeline stages (default: 1)")
    parser.add_argument("--ep", type=int, default=0, help="expert-parallel size within dp; 0: no experts (default)")
    parser.add_argument("--moe", type=int, default=4, metavar="N", help="experts of a block, with --ep (default: 4)")
    parser.add_argument("--shard", choices=("ddp", "fsdp2"), default="ddp", help="data parallelism (default: ddp)")
    parser.add_argument("--layers", type=int, default=4, help="transformer blocks (default: 4)")
    parser.add_argument("--dim", type=int, default=32, help="model width (default: 32)")
    parser.add_argument("--heads", type=int, default=4, help="attention heads (default: 4)")
    parser.add_argument("--vocab", type=int, default=64, help="vocabulary (default: 64)")
    parser.add_argument("--seq", type=int, default=16, help="tokens of a sequence (default: 16)")
    parser.add_argument("--batch", type=int, default=8, help="sequences of a replica and step (default: 8)")
    parser.add_argument("--microbatches", type=int, default=4, help="parts of a batch, with --pp (default: 4)")
    parser.add_argument("--steps", type=int, default=4, help="training steps (default: 4)")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate (default: 0.003)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and data (default: 0)")
    parser.add_argument("--pace", type=float, default=0.0, metavar="MS", help="sleep of a block's forward, in ms")
    parser.add_argument("--backend", default="gloo", help="gloo on CPU (default), or nccl on GPUs")
    args = parser.parse_args()
    world = int(os.environ["WORLD_SIZE"])
    if world % (args.tp * args.pp):
        parser.error(f"world size {world} is not a multiple of tp x pp")
    args.dp = world // (args.tp * args.pp)
    if args.ep and (args.dp % args.ep or args.moe % args.ep):
        parser.error(f"--ep {args.ep} must divide dp {args.dp} and --moe {args.moe}")
    if args.layers < args.pp or args.heads % args.tp or args.dim % args.heads or args.vocab % args.tp:
        parser.error("layers >= pp, and heads/tp, dim/heads and vocab/tp without remainder are needed")
    if args.pp > 1 and args.batch % args.microbatches:
        parser.error("--batch must be a multiple of --microbatches")
    return args


class Pace(torch.autograd.Function):
    """The identity, taking `ms` milliseconds forward and twice that backward."""

    @staticmethod
    def forward(ctx, x, ms):
        ctx.ms = ms
        time.sleep(ms / 1e3)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        time.sleep(2 * ctx.ms / 1e3)
        return grad, None


class Exchange(torch.autograd.Function):
    """all_to_all_single of rows with uneven splits; backward returns the gradients' rows."""

    @staticmethod
    def forward(ctx, rows, send, recv, group):
        ctx.send, ctx.recv, ctx.group = send, recv, group
        arrived = rows.new_empty(sum(recv), rows.shape[1])
        dist.all_to_all_single(arrived, rows.contiguous(), recv, send, group=group)
        return arrived

    @staticmethod
    def backward(ctx, grad):
        returned = grad.new_empty(sum(ctx.send), grad.shape[1])
        dist.all_to_all_single(returned, grad.contiguous(), ctx.send, ctx.recv, group=ctx.group)
        return returned, None, None, None


class MLP(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.up = nn.Linear(dim, 4 * dim, bias=False)
        self.down = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class MoE(nn.Module):
    """Experts spread over a group; each token goes to the expert that its router prefers.

    Expert parameters are the same on all tp ranks, which route the same tokens.
    """

    def __init__(self, args: argparse.Namespace, seed: int, group: dist.ProcessGroup):
        super().__init__()
        self.group = group
        self.ranks, self.local = args.ep, args.moe // args.ep
        self.router = nn.Linear(args.dim, args.moe, bias=False)
        first = dist.get_rank(group) * self.local
        self.experts = nn.ModuleList()
        for expert in range(first, first + self.local):
            torch.manual_seed(seed + 1 + expert)
            self.experts.append(MLP(args.dim))

    def forward(self, x):
        tokens = x.flatten(0, 1)
        gate, chosen = self.router(tokens).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, minlength=self.ranks * self.local)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self.group)
        send = counts.view(self.ranks, self.local).sum(1).tolist()
        recv = arriving.view(self.ranks, self.local).sum(1).tolist()

        rows = Exchange.apply(tokens[order], send, recv, self.group)
        rows = self.compute(rows, arriving)
        rows = Exchange.apply(rows, recv, send, self.group)
        out = torch.zeros_like(tokens).index_copy(0, order, rows) * gate[:, None]
        return out.view_as(x)

    def compute(self, rows, arriving):
        """Apply to each row its expert; rows lie by source rank, then by local expert."""
        owner = torch.arange(self.local, device=rows.device).repeat(self.ranks).repeat_interleave(arriving)
        places = [(owner == i).nonzero().flatten() for i in range(self.local)]
        done = [expert(rows[place]) for expert, place in zip(self.experts, places, strict=True)]
        return torch.cat(done)[torch.cat(places).argsort()]


class Attention(nn.Module):
    """Causal attention; the rows of `qkv` lie by head, so that tp ranks can split it by rows."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.width = dim // heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (-1, 3, self.width)).transpose(1, 3).unbind(1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, args: argparse.Namespace, index: int, pace: float, ep_group: dist.ProcessGroup | None):
        super().__init__()
        seed = 1000 * (args.seed + 1) + 100 * index
        torch.manual_seed(seed)
        self.pace = pace * (1 + 0.15 * (index % 3))
        self.norm1, self.norm2 = nn.LayerNorm(args.dim), nn.LayerNorm(args.dim)
        self.attention = Attention(args.dim, args.heads)
        self.mlp = MoE(args, seed, ep_group) if args.ep else MLP(args.dim)

    def forward(self, x):
        if self.pace:
            x = Pace.apply(x, self.pace)
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Head(nn.Module):
    def __init__(self, args: argparse.Namespace, pace: float):
        super().__init__()
        torch.manual_seed(1000 * (args.seed + 1) + 99)
        self.pace = pace / 4
        self.norm = nn.LayerNorm(args.dim)
        self.logits = nn.Linear(args.dim, args.vocab, bias=False)

    def forward(self, x):
        if self.pace:
            x = Pace.apply(x, self.pace)
        return self.logits(self.norm(x))


class Embedding(nn.Module):
    def __init__(self, args: argparse.Namespace):
        super().__init__()
        torch.manual_seed(1000 * (args.seed + 1) + 98)
        self.token = nn.Embedding(args.vocab, args.dim)
        self.position = nn.Parameter(0.02 * torch.randn(args.seq, args.dim))

    def forward(self, tokens):
        return self.token(tokens) + self.position


def build_stage(args: argparse.Namespace, mesh: DeviceMesh, ep_group: dist.ProcessGroup | None) -> nn.Sequential:
    """This rank's pipeline stage, whole; its weights depend on the seed and the layer alone."""
    stage = mesh.get_local_rank("pp")
    pace = args.pace * (1 + 0.05 * mesh.get_local_rank("dp"))
    modules: list[nn.Module] = [Embedding(args)] if stage == 0 else []
    first, end = args.layers * stage // args.pp, args.layers * (stage + 1) // args.pp
    modules += [Block(args, index, pace, ep_group) for index in range(first, end)]
    if stage == args.pp - 1:
        modules.append(Head(args, pace))
    return nn.Sequential(*modules)


def apply_tp(stage: nn.Sequential, tp: DeviceMesh) -> None:
    """Split attention heads, hidden units and vocabulary; everything between stays replicated."""
    column, row = ColwiseParallel(), RowwiseParallel()
    block = {"attention.qkv": column, "attention.out": row, "mlp.up": column, "mlp.down": row}
    for module in stage:
        if isinstance(module, Embedding):
            parallelize_module(module, tp, {"token": RowwiseParallel(input_layouts=Replicate())})
        elif isinstance(module, Head):
            parallelize_module(module, tp, {"logits": ColwiseParallel(output_layouts=Replicate())})
        elif isinstance(module.mlp, MoE):
            parallelize_module(module, tp, {name: plan for name, plan in block.items() if "mlp" not in name})
        else:
            parallelize_module(module, tp, block)


class AsDTensor(nn.Module):
    """Presents a plain parameter as the DTensor of which it is the local part."""

    def __init__(self, whole: DTensor):
        super().__init__()
        self.mesh, self.placements = whole.device_mesh, whole.placements

    def forward(self, local):
        return DTensor.from_local(local, self.mesh, self.placements, run_check=False)


def keep_local_parameters(model: nn.Module) -> None:
    """Turn DTensor parameters into plain ones, which DDP can put into its buckets."""
    for module in list(model.modules()):
        for name, whole in list(module.named_parameters(recurse=False)):
            if isinstance(whole, DTensor):
                setattr(module, name, nn.Parameter(whole.to_local().detach()))
                parametrize.register_parametrization(module, name, AsDTensor(whole), unsafe=True)


def expert_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if ".experts." in name}


def apply_dp(stage: nn.Sequential, dp: DeviceMesh, shard: str) -> nn.Module:
    """Wrap everything but the experts in DDP or FSDP2; the experts see `average_experts`."""
    experts = expert_parameters(stage)
    if shard == "fsdp2":
        for module in stage:
            fully_shard(module, mesh=dp, ignored_params=set(experts.values()))
        return fully_shard(stage, mesh=dp, ignored_params=set(experts.values()))
    keep_local_parameters(stage)
    # Underscored, yet the only way to tell DDP what it must not average.
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(stage, list(experts))
    return DistributedDataParallel(stage, process_group=dp.get_group())


def expert_groups(args: argparse.Namespace, mesh: DeviceMesh) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """The group that exchanges tokens, and the group that holds copies of the same experts."""
    ranks = mesh.mesh.permute(0, 2, 1).reshape(-1, args.dp // args.ep, args.ep)
    exchange, _ = dist.new_subgroups_by_enumeration(ranks.flatten(0, 1).tolist())
    copies, _ = dist.new_subgroups_by_enumeration(ranks.transpose(1, 2).flatten(0, 1).tolist())
    return exchange, copies


def average_experts(experts: list[nn.Parameter], copies: dist.ProcessGroup, dp: int) -> None:
    """Average expert gradients over dp: the exchange has already summed over the ep ranks."""
    for parameter in experts:
        if dist.get_world_size(copies) > 1:
            dist.all_reduce(parameter.grad, group=copies)
        parameter.grad.div_(dp)


def loss_fn(logits, target):
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def make_schedule(args: argparse.Namespace, model: nn.Module, pp: DeviceMesh, device: torch.device) -> Schedule1F1B:
    """A 1F1B schedule with shapes given: inferring them would run a router on made-up data."""
    rank, rows = pp.get_local_rank(), args.batch // args.microbatches
    hidden = torch.empty(rows, args.seq, args.dim, device=device, requires_grad=True)
    tokens = torch.empty(rows, args.seq, dtype=torch.int64, device=device)
    logits = torch.empty(rows, args.seq, args.vocab, device=device, requires_grad=True)
    stage = PipelineStage(
        model,
        rank,
        args.pp,
        device,
        input_args=tokens if rank == 0 else hidden,
        output_args=logits if rank == args.pp - 1 else hidden,
        group=pp.get_group(),
    )
    return Schedule1F1B(stage, args.microbatches, loss_fn=loss_fn)


def next_batch(args: argparse.Namespace, generator: torch.Generator, device: torch.device):
    """Sequences that climb by one or two tokens a place, and the same shifted by one."""
    start = torch.randint(args.vocab, (args.batch, 1), generator=generator)
    climb = torch.randint(1, 3, (args.batch, args.seq), generator=generator).cumsum(1)
    text = (torch.cat([start, start + climb], 1) % args.vocab).to(device)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def forward_backward(args, model, schedule, stage, tokens, target):
    """Accumulate the gradients of one batch; return its loss, or None off the last stage."""
    if schedule is None:
        loss = loss_fn(model(tokens), target)
        loss.backward()
        return loss.detach()
    losses: list[torch.Tensor] = []
    if stage == 0:
        schedule.step(tokens)
    elif stage == args.pp - 1:
        schedule.step(target=target, losses=losses)
    else:
        schedule.step()
    return torch.stack(losses).mean().detach() if losses else None


def say(line: str) -> None:
    """Print with one write: torchrun's children are unbuffered, and print would write the newline apart."""
    print(line + "\n", end="", flush=True)


def train(args: argparse.Namespace, device: torch.device) -> None:
    mesh = init_device_mesh(device.type, (args.pp, args.dp, args.tp), mesh_dim_names=("pp", "dp", "tp"))
    exchange, copies = expert_groups(args, mesh) if args.ep else (None, None)
    model: nn.Module = build_stage(args, mesh, exchange).to(device)
    if args.tp > 1:
        apply_tp(model, mesh["tp"])
    if args.dp > 1:
        model = apply_dp(model, mesh["dp"], args.shard)
    schedule = make_schedule(args, model, mesh["pp"], device) if args.pp > 1 else None
    experts = list(expert_parameters(model).values())
    plain = not any(isinstance(parameter, DTensor) for parameter in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, foreach=False, fused=plain)
    generator = torch.Generator().manual_seed(args.seed + 1 + mesh.get_local_rank("dp"))
    rank, stage = dist.get_rank(), mesh.get_local_rank("pp")

    for step in range(args.steps):
        began = time.perf_counter()
        tokens, target = next_batch(args, generator, device)
        optimizer.zero_grad()
        loss = forward_backward(args, model, schedule, stage, tokens, target)
        if copies is not None:
            average_experts(experts, copies, args.dp)
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        elapsed = 1e3 * (time.perf_counter() - began)
        if loss is not None:
            say(f"loss rank {rank} step {step} {loss.item().hex()}")
        say(f"time rank {rank} step {step} {elapsed:.3f}")


def main() -> None:
    args = parse_args()
    device = torch.device("cpu")
    if args.backend == "nccl":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group(args.backend)
    train(args, device)
    dist.barrier()  # or a gloo thread may still free a tensor while Python shuts down, and abort
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
