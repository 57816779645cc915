"""A tiny GPT trained by megatron-core (0.16 or later), as one would on GPUs: NCCL, bf16, 1F1B, distributed optimizer.
With --chunks, 1F1B is interleaved; with --experts, layers have a mixture of experts, spread over --ep ranks, and with --tp
sequences are then split too.

Run by torchrun on GPUs, or by ``prism-record --pretend-cuda`` on any machine. Every rank of the last stage prints its losses.
"""

import argparse
import os
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

VOCABULARY = 128

if not hasattr(moe_utils, "te_general_gemm"):  # 0.16's routers ask for it, defined or not
    moe_utils.te_general_gemm = None


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    sizes = {"tp": 2, "pp": 2, "ep": 1, "chunks": 1, "experts": 0}
    sizes |= {"steps": 3, "layers": 4, "hidden": 64, "heads": 4, "length": 32, "micro-batches": 4}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args()


class Norm(torch.nn.LayerNorm):
    """Megatron's own, without Apex or Transformer Engine, refuses split sequences."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__(hidden_size, eps, dtype=config.params_dtype)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def layers(args: argparse.Namespace) -> TransformerBlockSubmodules:
    layer = get_gpt_layer_local_spec(num_experts=args.experts or None)
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    return TransformerBlockSubmodules([layer] * (args.layers // args.pp // args.chunks), Norm)


def build(args: argparse.Namespace) -> list[DistributedDataParallel]:
    """This rank's chunks and slices of the model, their gradients reduced over the data-parallel group."""
    config = TransformerConfig(
        num_layers=args.layers,
        hidden_size=args.hidden,
        num_attention_heads=args.heads,
        tensor_model_parallel_size=args.tp,
        pipeline_model_parallel_size=args.pp,
        virtual_pipeline_model_parallel_size=args.chunks if args.chunks > 1 else None,
        num_moe_experts=args.experts or None,
        expert_model_parallel_size=args.ep,
        add_bias_linear=not args.experts,
        sequence_parallel=bool(args.experts) and args.tp > 1,
        moe_token_dispatcher_type="alltoall",
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
    )
    ddp_config = DistributedDataParallelConfig(overlap_grad_reduce=True, use_distributed_optimizer=True)
    chunks = []
    for chunk in range(args.chunks):
        place = {"ignore_virtual": False, "vp_stage": chunk} if args.chunks > 1 else {}
        model = GPTModel(
            config=config,
            transformer_layer_spec=layers(args),
            vocab_size=VOCABULARY,
            max_sequence_length=args.length,
            pre_process=parallel_state.is_pipeline_first_stage(**place),
            post_process=parallel_state.is_pipeline_last_stage(**place),
            vp_stage=chunk if args.chunks > 1 else None,
        ).cuda()
        half = Float16Module(config, model)
        chunks.append(DistributedDataParallel(config, ddp_config, half, disable_bucketing=chunk > 0))
    config.finalize_model_grads_func = finalize_model_grads
    config.no_sync_func = [chunk.no_sync for chunk in chunks] if args.chunks > 1 else chunks[0].no_sync
    return chunks


def batches(args: argparse.Namespace) -> Iterator[dict[str, torch.Tensor]]:
    """The next micro-batch of this rank's data-parallel replica: int64[2, length] tokens and labels."""
    draw = torch.Generator(device="cuda").manual_seed(parallel_state.get_data_parallel_rank())
    shape = (2, args.length + 1)
    while True:
        text = torch.randint(0, VOCABULARY, shape, generator=draw, device="cuda")
        yield {"tokens": text[:, :-1].contiguous(), "labels": text[:, 1:].contiguous()}


def forward(data: Iterator, model: torch.nn.Module) -> tuple[torch.Tensor, Callable]:
    batch = next(data)
    tokens, length = batch["tokens"], batch["tokens"].shape[1]
    positions = torch.arange(length, device=tokens.device).expand_as(tokens)
    mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=tokens.device).triu(1)

    def loss(output: torch.Tensor) -> tuple[torch.Tensor, dict]:
        mean = output.float().mean()
        return mean, {"loss": mean.detach().clone()}

    return model(tokens, positions, mask, labels=batch["labels"]), loss


def main() -> None:
    args = options()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    parallel_state.initialize_model_parallel(
        args.tp, args.pp, args.chunks if args.chunks > 1 else None, expert_model_parallel_size=args.ep
    )
    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1)
    model = build(args)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-3, bf16=True, use_distributed_optimizer=True), model)
    train, data = get_forward_backward_func(), [batches(args) for _ in model]
    for step in range(args.steps):
        for chunk in model:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        losses = train(
            forward_step_func=forward,
            data_iterator=data,
            model=model,
            num_microbatches=args.micro_batches,
            seq_length=args.length,
            micro_batch_size=2,
            forward_only=False,
        )
        optimizer.step()
        if losses:
            mean = sum(each["loss"] for each in losses) / len(losses)
            print(f"loss rank {dist.get_rank()} step {step} {mean.item().hex()}\n", end="", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
