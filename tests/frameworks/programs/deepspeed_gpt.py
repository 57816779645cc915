"""A tiny transformer trained by DeepSpeed on CPUs (DS_ACCELERATOR=cpu): ZeRO's --stage 1, 2 or 3."""

import argparse

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

VOCABULARY, WIDTH, LENGTH = 64, 32, 16


class Language(nn.Module):
    """Loss of predicting each next token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.Sequential(
            *(nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.0, batch_first=True) for _ in range(2))
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        scores = self.head(self.layers(self.embed(tokens[:, :-1])))
        return nn.functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()
    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = Language()
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": args.stage},
            "zero_force_ds_cpu_optimizer": False,
        },
    )
    rank = dist.get_rank()
    draw = torch.Generator().manual_seed(rank)
    for step in range(args.steps * engine.gradient_accumulation_steps()):
        loss = engine(torch.randint(0, VOCABULARY, (2, LENGTH), generator=draw))
        engine.backward(loss)
        engine.step()
        print(f"loss rank {rank} step {step} {loss.item().hex()}\n", end="", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
