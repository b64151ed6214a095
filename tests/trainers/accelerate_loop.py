"""A loop with Accelerator: accumulated gradients, clipping, a schedule."""

from __future__ import annotations

import sys

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.utils.data import DataLoader

from tests.trainers.small import STEPS, examples, llama, tell


def main(folder: str) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, project_dir=folder)
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
    rows = DataLoader(examples(16 * STEPS), batch_size=8)
    model, optimizer, rows, schedule = accelerator.prepare(model, optimizer, rows, schedule)
    losses: list[Tensor] = []
    for batch in rows:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    accelerator.save_state(f"{folder}/state")
    tell(losses, model.state_dict())


if __name__ == "__main__":
    main(sys.argv[1])
