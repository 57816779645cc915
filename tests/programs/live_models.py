"""Small models in every way of parallel training, for live_suite.py: results are the losses of a few steps."""

import shutil
import tempfile
from concurrent.futures import Future
from functools import partial

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WIDTH, ROWS, STEPS = 16, 16, 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


class Exchange(torch.autograd.Function):
    """all_to_all_single whose gradient goes the other way."""

    @staticmethod
    def forward(context, x, sent, received):
        context.splits = sent, received
        out = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), received, sent)
        return out

    @staticmethod
    def backward(context, grad):
        sent, received = context.splits
        out = grad.new_empty(sum(sent), *grad.shape[1:])
        dist.all_to_all_single(out, grad.contiguous(), sent, received)
        return out, None, None


class Models:
    """The cases of one rank: methods without a leading underscore."""

    def __init__(self, device):
        self._device, self._rank, self._world = device, dist.get_rank(), dist.get_world_size()

    def _net(self, seed=0, blocks=3):
        torch.manual_seed(seed)
        return nn.Sequential(*[Block() for _ in range(blocks)]).to(self._device)

    def _batch(self, step, rank):
        generator = torch.Generator().manual_seed(1000 * step + rank)
        return [torch.randn(ROWS, WIDTH, generator=generator).to(self._device) for _ in range(2)]

    def _train(self, model, rank=None, clip=False):
        """Losses of each step, norms of the gradients if ``clip``, and this rank's part of the parameters."""
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        results = []
        for step in range(STEPS):
            inputs, targets = self._batch(step, self._rank if rank is None else rank)
            loss = F.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            if clip:
                results.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1).full_tensor())
            optimizer.step()
            results.append(loss)
        return results + [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]

    def _ddp(self, **options):
        return DistributedDataParallel(self._net(), bucket_cap_mb=0.005, **options)

    def _hooked(self, state, hook):
        model = self._ddp()
        model.register_comm_hook(state, hook)
        return self._train(model)

    def _sharded(self, mesh, **options):
        model = self._net()
        for block in model:
            fully_shard(block, mesh=mesh, **options)
        return self._train(fully_shard(model, mesh=mesh, **options), clip=True)

    def _mesh(self, *shape):
        return init_device_mesh(
            self._device.type, shape or (self._world,), mesh_dim_names=("outer", "inner")[: len(shape) or 1]
        )

    def ddp(self):
        return self._train(self._ddp())

    def ddp_static(self):
        return self._train(self._ddp(static_graph=True))

    def ddp_bucket_view(self):
        return self._train(self._ddp(gradient_as_bucket_view=True))

    def ddp_bf16(self):
        return self._hooked(None, default_hooks.bf16_compress_hook)

    def ddp_fp16(self):
        return self._hooked(None, default_hooks.fp16_compress_hook)

    def ddp_power_sgd(self):
        state = powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2, min_compression_rate=0.5, random_seed=0)
        return self._hooked(state, powerSGD_hook.powerSGD_hook)

    def ddp_no_sync(self):
        """Two backward passes, of which only the second communicates; a parameter takes no part in either."""
        model = self._net()
        model.register_parameter("spare", nn.Parameter(torch.ones(3, device=self._device)))
        model = DistributedDataParallel(model, find_unused_parameters=True)
        (first, second), (third, fourth) = (self._batch(step, self._rank) for step in range(2))
        with model.no_sync():
            F.mse_loss(model(first), second).backward()
        F.mse_loss(model(third), fourth).backward()
        return [parameter.grad for parameter in model.parameters()]

    def ddp_join(self):
        """Ranks with unequal numbers of steps."""
        model, losses = self._ddp(), []
        with Join([model]):
            for step in range(1 + self._rank % 2):
                losses.append(model(self._batch(step, self._rank)[0]).square().sum())
                losses[-1].backward()
        return losses

    def zero_optimizer(self):
        model = self._ddp()
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
        for step in range(STEPS):
            model(self._batch(step, self._rank)[0]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return list(model.parameters())

    def fsdp2(self):
        return self._sharded(self._mesh())

    def fsdp2_mixed_precision(self):
        return self._sharded(self._mesh(), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32))

    def hsdp(self):
        return self._sharded(self._mesh(2, self._world // 2)) if self._world >= 4 else None

    def dtensor(self):
        """A product of sharded matrices, and every change of placement."""
        mesh = self._mesh()
        matrix = distribute_tensor(self._batch(0, 0)[0], mesh, [Shard(0)])
        other = distribute_tensor(self._batch(0, 0)[1], mesh, [Replicate()])
        parts = DTensor.from_local(torch.full((8, 8), self._rank + 1.0, device=self._device), mesh, [Partial()])
        placed = [matrix.redistribute(mesh, [to]) for to in (Replicate(), Shard(1))]
        placed += [parts.redistribute(mesh, [to]) for to in (Replicate(), Shard(0), Shard(1))]
        return [each.to_local() for each in placed], (matrix @ other).full_tensor(), matrix.sum().full_tensor()

    def tensor_parallel(self):
        model, mesh = self._net(), self._mesh()
        for block in model:
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return self._train(model, rank=0)

    def sequence_parallel(self):
        """Activations sharded between the layers, the loss over sharded classes."""
        torch.manual_seed(0)
        model = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8 * self._world))
        plan = {
            "0": SequenceParallel(sequence_dim=0, use_local_output=True),
            "1": ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate()),
            "2": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
        }
        model = parallelize_module(model.to(self._device), self._mesh(), plan)
        inputs = self._batch(0, 0)[0].chunk(self._world)[self._rank]
        targets = torch.arange(ROWS, device=self._device) % (8 * self._world)
        with loss_parallel():
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
        return [loss.full_tensor(), *[p.grad.full_tensor() for p in model.parameters() if isinstance(p.grad, DTensor)]]

    def _pipeline(self, make, chunks):
        """``chunks`` stages on each rank; losses are on the last one."""
        numbers = [self._rank + chunk * self._world for chunk in range(chunks)]
        parts = [self._net(10 + number, 1) for number in numbers]
        total = self._world * chunks
        stages = [PipelineStage(*each, total, self._device) for each in zip(parts, numbers, strict=True)]
        schedule = make(stages if chunks > 1 else stages[0], 2 * self._world, loss_fn=F.mse_loss)
        parameters = [parameter for part in parts for parameter in part.parameters()]
        optimizer, results = torch.optim.SGD(parameters, 0.1), []
        for step in range(2):
            inputs, targets = self._batch(step, 0)
            losses = []
            last = {"target": targets, "losses": losses} if self._rank == self._world - 1 else {}
            schedule.step(*([inputs] if self._rank == 0 else []), **last)
            optimizer.step()
            optimizer.zero_grad()
            results += losses
        return results, parameters

    def pipeline_1f1b(self):
        return self._pipeline(Schedule1F1B, 1)

    def pipeline_gpipe(self):
        return self._pipeline(ScheduleGPipe, 1)

    def pipeline_interleaved(self):
        return self._pipeline(ScheduleInterleaved1F1B, 2)

    def experts(self):
        """Tokens go to the rank of their expert: splits depend on values, counts are exchanged first."""
        torch.manual_seed(0)
        router = nn.Linear(WIDTH, self._world).to(self._device)
        expert, results = self._net(50 + self._rank, 1), []
        optimizer = torch.optim.SGD([*router.parameters(), *expert.parameters()], 0.1)
        for step in range(STEPS):
            tokens = self._batch(step, self._rank)[0]
            weight, choice = F.softmax(router(tokens), -1).max(-1)
            order, counts = torch.argsort(choice, stable=True), torch.bincount(choice, minlength=self._world)
            incoming = torch.empty_like(counts)
            dist.all_to_all_single(incoming, counts)
            sent, received = counts.tolist(), incoming.tolist()
            back = Exchange.apply(expert(Exchange.apply(tokens[order], sent, received)), received, sent)
            mixed = torch.empty_like(back).index_copy(0, order, back) * weight[:, None]
            loss = (mixed - tokens.sin()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            for work in [dist.all_reduce(each.grad, async_op=True) for each in router.parameters()]:
                work.wait()
            optimizer.step()
            results += [loss, sent]
        return results

    def batch_norm(self):
        """Statistics over all ranks (CUDA only)."""
        model = nn.SyncBatchNorm(WIDTH).to(self._device)
        out = model(self._batch(0, self._rank)[0])
        out.square().sum().backward()
        return out, model.weight.grad

    def data_loader(self):
        """Worker processes are forked while groups exist."""
        data = TensorDataset(torch.arange(16.0))
        loader = DataLoader(data, 2, sampler=DistributedSampler(data, shuffle=False), num_workers=1)
        sums = [batch[0].sum().to(self._device) for batch in loader]
        for tensor in sums:
            dist.all_reduce(tensor)
        return sums

    def saved(self, save=checkpoint.save):
        """A sharded checkpoint is written, and read into another model."""
        folders = [tempfile.mkdtemp() if self._rank == 0 else None]
        dist.broadcast_object_list(folders, 0)
        models = [fully_shard(self._net(seed), mesh=self._mesh()) for seed in (1, 2)]
        try:
            pending = save(models[0].state_dict(), checkpoint_id=folders[0])
            if isinstance(pending, Future):
                pending.result()
            state = models[1].state_dict()
            checkpoint.load(state, checkpoint_id=folders[0])
        finally:
            dist.barrier()
            if self._rank == 0:
                shutil.rmtree(folders[0])
        return [parameter.full_tensor() for parameter in state.values()]

    def saved_by_a_thread(self):
        """Wants a CPU backend."""
        return self.saved(checkpoint.async_save)


def cases(device):
    """The cases by name."""
    models = Models(device)
    # Under gloo, powerSGD waits for operations in gloo's own few threads, in vain; SyncBatchNorm wants CUDA.
    left_out = () if device.type == "cuda" else ("ddp_power_sgd", "batch_norm")
    methods = {name: method for name, method in vars(Models).items() if not name.startswith("_")}
    return {name: partial(method, models) for name, method in methods.items() if name not in left_out}
