"""A LoRA of PEFT on weights in 8 bits by torchao."""

# mypy: no-warn-return-any
from __future__ import annotations

import sys

import peft
import torch
from torchao.quantization import Int8WeightOnlyConfig, quantize_

from tests.trainers.small import llama, train


def main(folder: str, *_: str) -> None:
    model = llama()
    quantize_(model.model, Int8WeightOnlyConfig())
    adapters = peft.LoraConfig(r=8, lora_alpha=16, lora_dropout=0.05, target_modules="all-linear")
    model = peft.get_peft_model(model, adapters).train()
    train(model, torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-3))


if __name__ == "__main__":
    main(*sys.argv[1:])
