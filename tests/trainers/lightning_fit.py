"""Trainer of Lightning, with accumulated gradients and clipping."""

from __future__ import annotations

import sys

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests.trainers.small import STEPS, examples, llama, tell


class Module(pl.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.model = llama()
        self.losses: list[Tensor] = []

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(folder: str) -> None:
    module = Module()
    trainer = pl.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        max_steps=STEPS,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(examples(16 * STEPS), batch_size=8))
    tell(module.losses, module.model.state_dict())


if __name__ == "__main__":
    main(sys.argv[1])
