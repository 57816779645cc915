"""A Llama of two layers trained by torchtitan's trainer on GPUs: FSDP2, and --tp, --pp.

With torch 2.13 it must do without Trainer.train, which sets time limits by a function of 2.14, and without typed SPMD.
"""

import argparse
import tempfile
from dataclasses import dataclass

import torch
import torch.distributed as dist
from datasets import Dataset
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

LENGTH = 64


class Letters(BaseTokenizer):
    """One token for each letter."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, *, tokenizer_path: str) -> None:
        super().__init__()
        self.eos_id = 0

    def encode(self, text: str, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        return [*text.encode(), 0]

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode()

    def get_vocab_size(self) -> int:
        return 128


class Talking(Trainer):
    """Says each rank's loss in full."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        pass

    def forward_backward_step(self, **inputs: object) -> torch.Tensor:
        loss = super().forward_backward_step(**inputs)
        if not self.parallel_dims.pp_enabled or self.pp_has_last_stage:
            print(f"loss rank {dist.get_rank()} step {self.step} {loss.item().hex()}\n", end="", flush=True)
        return loss


def texts(_: str) -> Dataset:
    """Sums with their results."""
    return Dataset.from_list([{"text": f"{n} and {n * 7 % 31} are {n + n * 7 % 31}."} for n in range(400)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in {"tp": 1, "pp": 1, "steps": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    DATASETS["sums"] = DatasetConfig(path="", loader=texts, sample_processor=lambda sample: sample["text"])
    spec = model_registry("debugmodel")
    spec.model.layers = spec.model.layers[:2]
    with tempfile.TemporaryDirectory() as folder:
        trainer = Talking.Config(
            model_spec=spec,
            dump_folder=folder,
            tokenizer=Letters.Config(),
            dataloader=HuggingFaceTextDataLoader.Config(dataset="sums"),
            loss=CrossEntropyLoss.Config(global_vocab_size=spec.model.vocab_size),
            optimizer=default_adamw(lr=1e-3),
            training=TrainingConfig(local_batch_size=2, seq_len=LENGTH, steps=args.steps, disable_cuda_graphs=True),
            parallelism=ParallelismConfig(
                tensor_parallel_degree=args.tp, pipeline_parallel_degree=args.pp, spmd_backend="partial_dtensor"
            ),
            metrics=MetricsProcessor.Config(log_freq=1),
            activation_checkpoint=None,
            debug=DebugConfig(seed=1),
        ).build()
        batches = trainer.batch_generator(trainer.dataloader)
        for trainer.step in range(1, args.steps + 1):
            trainer.train_step(batches)
        trainer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
