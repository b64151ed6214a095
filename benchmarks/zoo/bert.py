"""BERT of `transformers`, which fills in masked words of padded sentences: autocast to bf16, AdamW."""

# mypy: no-warn-return-any
from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.zoo.program import Program, enable_checkpointing, seeded, transformers


def make(size: str, device: torch.device | str, checkpoint: bool = False) -> Program:
    hf, device = transformers(), torch.device(device)
    width, layers, heads, vocabulary, batch, length = (
        (1024, 24, 16, 30522, 32, 512) if size == "full" else (64, 2, 4, 128, 2, 16)
    )
    generator = seeded(device)
    config = hf.BertConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        max_position_embeddings=length,
    )
    model = hf.BertForMaskedLM(config).to(device).train()
    if checkpoint:
        enable_checkpointing(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01)

    def step() -> Tensor:
        words = torch.randint(5, vocabulary, (batch, length), device=device, generator=generator)
        lengths = torch.randint(length // 2, length + 1, (batch, 1), device=device, generator=generator)
        real = torch.arange(length, device=device) < lengths
        hidden = (torch.rand(batch, length, device=device, generator=generator) < 0.15) & real
        hidden[:, 0] = True
        with torch.autocast(device.type, torch.bfloat16):
            loss: Tensor = model(
                input_ids=words.masked_fill(hidden, 4).masked_fill(~real, 0),
                attention_mask=real.long(),
                labels=words.masked_fill(~hidden, -100),
            ).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return Program((model,), (optimizer,), step)
