"""A GPT whose weights, gradients and moments in fp32 fill most of the memory, as its blocks are checkpointed anyway."""

# mypy: no-warn-return-any
from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.zoo.gpt import GPT
from benchmarks.zoo.program import Program, seeded

OWN = False


def make(size: str, device: torch.device | str, checkpoint: bool = False, *, fused: bool | None = True) -> Program:
    device = torch.device(device)
    layers, width, heads, length, vocabulary, batch = (
        (24, 2048, 16, 1024, 32000, 8) if size == "full" else (2, 32, 2, 16, 100, 2)
    )
    generator = seeded(device)
    with device:
        model = GPT(layers, width, heads, length, vocabulary, checkpoint=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)

    def step() -> Tensor:
        tokens = torch.randint(vocabulary, (batch, length + 1), device=device, generator=generator)
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return Program((model,), (optimizer,), step)
