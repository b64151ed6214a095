"""A frozen Llama of `transformers` in bf16 with adapters of `peft`, and its blocks checkpointed, as is usual."""

# mypy: no-warn-return-any
from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.zoo.program import Program, enable_checkpointing, package, seeded

NEEDS = ("transformers", "peft")
OWN = False


def make(size: str, device: torch.device | str, checkpoint: bool = False) -> Program:
    hf, peft, device = package("transformers"), package("peft"), torch.device(device)
    width, layers, heads, vocabulary, batch, length = (
        (2048, 16, 16, 32000, 18, 2048) if size == "full" else (64, 2, 4, 128, 1, 16)
    )
    generator = seeded(device)
    config = hf.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=11 * width // 4,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=length,
        use_cache=False,
    )
    model = hf.LlamaForCausalLM(config).to(device, torch.bfloat16)
    enable_checkpointing(model)
    model.enable_input_require_grads()
    adapters = peft.LoraConfig(r=16, lora_alpha=32, lora_dropout=0.05, target_modules="all-linear")
    model = peft.get_peft_model(model, adapters).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-4)

    def step() -> Tensor:
        tokens = torch.randint(vocabulary, (batch, length), device=device, generator=generator)
        loss: Tensor = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return Program((model,), (optimizer,), step)
