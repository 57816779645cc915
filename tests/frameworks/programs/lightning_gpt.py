"""A tiny transformer trained by Lightning on CPUs: --strategy ddp or fsdp."""

import argparse
import logging

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

VOCABULARY, WIDTH, LENGTH = 64, 32, 16


class Language(lightning.LightningModule):
    """Next-token prediction over random texts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.Sequential(
            *(nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.0, batch_first=True) for _ in range(2))
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        (tokens,) = batch
        scores = self.head(self.layers(self.embed(tokens[:, :-1])))
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())
        self.log("loss", loss, sync_dist=True)
        print(f"loss rank {self.global_rank} step {index} {loss.item().hex()}\n", end="", flush=True)
        return loss

    def on_train_epoch_end(self) -> None:
        mean = self.trainer.callback_metrics["loss"]
        print(f"loss rank {self.global_rank} mean {mean.item().hex()}\n", end="", flush=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategy", default="ddp")
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    lightning.seed_everything(0, verbose=False)
    texts = torch.randint(0, VOCABULARY, (64, LENGTH), generator=torch.Generator().manual_seed(1))
    trainer = lightning.Trainer(
        accelerator=args.accelerator,
        devices=args.devices,
        strategy=args.strategy,
        max_steps=args.steps,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Language(), DataLoader(TensorDataset(texts), batch_size=4))


if __name__ == "__main__":
    main()
