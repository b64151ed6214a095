"""What the programs with the Trainer of `transformers` share: it has the loop, and tells of each step."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.zoo.program import Program, its_own, package

NEEDS = ("transformers", "accelerate")


def trained(
    model: Any,
    optimizer: torch.optim.Optimizer,
    examples: list[dict[str, Tensor]],
    batch: int,
    **arguments: Any,
) -> Program:
    """A program whose loop is the Trainer's, on examples that are on the device already."""

    def loop(steps: int, each: Callable[[Tensor], None]) -> None:
        hf = package("transformers")
        losses: list[Tensor] = []

        class Trainer(hf.Trainer):  # type: ignore[misc, name-defined]
            def training_step(self, *inputs: Any, **named: Any) -> Any:
                loss = super().training_step(*inputs, **named)
                losses.append(loss.detach())
                return loss

        class Each(hf.TrainerCallback):  # type: ignore[misc, name-defined]
            def on_step_end(self, *_: Any, **__: Any) -> None:
                each(torch.stack(losses).sum())
                losses.clear()

        with tempfile.TemporaryDirectory() as folder:
            how = hf.TrainingArguments(
                output_dir=folder,
                max_steps=steps,
                per_device_train_batch_size=batch,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                dataloader_pin_memory=False,
                logging_steps=10,
                use_cpu=examples[0]["labels"].device.type == "cpu",
                gradient_checkpointing_kwargs={"use_reentrant": False},
                **arguments,
            )
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 50))
            Trainer(
                model=model,
                args=how,
                train_dataset=examples,
                data_collator=hf.default_data_collator,
                optimizers=(optimizer, schedule),
                callbacks=[Each()],
            ).train()

    return Program((model,), (optimizer,), its_own, loop)
