"""The Trainer of `transformers`: gradients of two batches are added up, and a second run goes on from a checkpoint."""

from __future__ import annotations

import sys
from typing import Any

import transformers
from torch import Tensor

from tests.trainers.small import STEPS, examples, llama, tell


def main(folder: str) -> None:
    losses: list[Tensor] = []

    class Trainer(transformers.Trainer):  # type: ignore[misc]
        def training_step(self, *inputs: Any, **named: Any) -> Any:
            loss = super().training_step(*inputs, **named)
            losses.append(loss.detach())
            return loss

    how = transformers.TrainingArguments(
        folder,
        max_steps=STEPS,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        save_steps=STEPS // 2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    for resumes in (False, True):
        trainer = Trainer(llama(), how, train_dataset=examples(16 * STEPS))
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-{STEPS // 2}" if resumes else None)
        tell(losses, trainer.model.state_dict())
        losses.clear()


if __name__ == "__main__":
    main(sys.argv[1])
