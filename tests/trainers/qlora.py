"""QLoRA: weights in 4 bits by bitsandbytes, or in 8, and a LoRA of PEFT; checkpointed or so re-entrantly, if asked."""

# mypy: no-warn-return-any
from __future__ import annotations

import sys
from typing import Any

import bitsandbytes as bnb
import peft
import torch
import transformers

from tests.trainers.small import llama, train


def in_bits(bits: int, folder: str) -> Any:
    """The model with all that it has in blocks in so many bits."""
    llama().save_pretrained(folder)
    if bits == 4:
        double: dict[str, Any] = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
        how = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16, **double)
    else:
        how = transformers.BitsAndBytesConfig(load_in_8bit=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=how, device_map={"": "cpu"})
    kind = bnb.nn.Linear4bit if bits == 4 else bnb.nn.Linear8bitLt
    assert sum(isinstance(module, kind) for module in model.modules()) == 28
    return model


def main(folder: str, how: str, *_: str) -> None:
    model = peft.prepare_model_for_kbit_training(
        in_bits(8 if how == "8bit" else 4, folder),
        use_gradient_checkpointing=how in ("checkpointed", "reentrant"),
        gradient_checkpointing_kwargs={"use_reentrant": False} if how == "checkpointed" else None,
    )
    adapters = peft.LoraConfig(r=8, lora_alpha=16, lora_dropout=0.05, target_modules="all-linear")
    model = peft.get_peft_model(model, adapters).train()
    train(model, torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-3))


if __name__ == "__main__":
    main(*sys.argv[1:])
