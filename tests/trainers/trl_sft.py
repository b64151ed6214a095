"""SFTTrainer of TRL with a LoRA of PEFT; with ``4bit`` on weights in 4 bits by bitsandbytes."""

from __future__ import annotations

import sys
from typing import Any

import datasets
import peft
import tokenizers
import transformers
import trl
from torch import Tensor

from tests.trainers.qlora import in_bits
from tests.trainers.small import LENGTH, STEPS, WORDS, llama, tell, texts


def tokenizer() -> Any:
    """A word is its number."""
    words = {f"w{number}": number for number in range(WORDS)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    named = {"unk_token": "w0", "pad_token": "w0", "bos_token": "w1", "eos_token": "w2"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **named)


def main(folder: str, *, quantized: bool) -> None:
    losses: list[Tensor] = []

    class Trainer(trl.SFTTrainer):  # type: ignore[misc]
        def training_step(self, *inputs: Any, **named: Any) -> Any:
            loss = super().training_step(*inputs, **named)
            losses.append(loss.detach())
            return loss

    how = trl.SFTConfig(
        folder,
        max_steps=STEPS,
        per_device_train_batch_size=8,
        max_length=LENGTH,
        activation_offloading=False,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
    )
    rows = [" ".join(f"w{word}" for word in row.tolist()) for row in texts(8 * STEPS)]
    trainer = Trainer(
        in_bits(4, folder) if quantized else llama(),
        how,
        train_dataset=datasets.Dataset.from_dict({"text": rows}),
        processing_class=tokenizer(),
        peft_config=peft.LoraConfig(r=8, lora_alpha=16, lora_dropout=0.05, target_modules="all-linear"),
    )
    trainer.train()
    tell(losses, trainer.model.state_dict())


if __name__ == "__main__":
    main(sys.argv[1], quantized="4bit" in sys.argv)
