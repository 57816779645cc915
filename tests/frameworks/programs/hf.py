"""A tiny Llama trained by HF Trainer on CPUs: DDP, or FSDP with --fsdp."""

import argparse
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

VOCABULARY, LENGTH = 64, 16


class Sentences(Dataset):
    """Texts of random tokens."""

    def __init__(self, count: int) -> None:
        self.tokens = torch.randint(0, VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class Talking(Trainer):
    """Says each rank's loss in full."""

    def training_step(self, model: torch.nn.Module, inputs: dict, *more: object) -> torch.Tensor:
        loss = super().training_step(model, inputs, *more)
        rank, step = self.args.process_index, self.state.global_step
        print(f"loss rank {rank} step {step} {loss.item().hex()}\n", end="", flush=True)
        return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fsdp", action="store_true")
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()
    set_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=LENGTH,
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        Talking(
            model=model,
            args=TrainingArguments(
                output_dir=folder,
                use_cpu=not args.fsdp,
                max_steps=args.steps,
                per_device_train_batch_size=2,
                learning_rate=1e-2,
                logging_steps=2,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                fsdp="full_shard auto_wrap" if args.fsdp else "",
                fsdp_config={"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]} if args.fsdp else None,
            ),
            train_dataset=Sentences(64),
        ).train()


if __name__ == "__main__":
    main()
