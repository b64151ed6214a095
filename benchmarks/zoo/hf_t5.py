"""T5 of `transformers`, with gated GELU: sequences to sequences, autocast to bf16, AdamW."""

# mypy: no-warn-return-any
from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.zoo.program import Program, enable_checkpointing, package, seeded

NEEDS = ("transformers",)


def make(size: str, device: torch.device | str, checkpoint: bool = False) -> Program:
    hf, device = package("transformers"), torch.device(device)
    width, layers, heads, vocabulary, batch, source, target = (
        (768, 12, 12, 32128, 24, 512, 256) if size == "full" else (64, 2, 4, 128, 2, 16, 8)
    )
    generator = seeded(device)
    config = hf.T5Config(
        vocab_size=vocabulary,
        d_model=width,
        d_kv=width // heads,
        d_ff=8 * width // 3,
        num_layers=layers,
        num_heads=heads,
        feed_forward_proj="gated-gelu",
        decoder_start_token_id=0,
        use_cache=False,
    )
    model = hf.T5ForConditionalGeneration(config).to(device).train()
    if checkpoint:
        enable_checkpointing(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> Tensor:
        inputs = torch.randint(1, vocabulary, (batch, source), device=device, generator=generator)
        labels = torch.randint(1, vocabulary, (batch, target), device=device, generator=generator)
        with torch.autocast(device.type, torch.bfloat16):
            loss: Tensor = model(input_ids=inputs, labels=labels).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return Program((model,), (optimizer,), step)
