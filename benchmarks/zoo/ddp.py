"""A GPT in bf16 on two GPUs under DistributedDataParallel, which sums gradients while backward runs."""

# mypy: no-warn-return-any
from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from benchmarks.zoo.gpt import GPT
from benchmarks.zoo.program import Program, join, seeded

RANKS = 2


def make(size: str, device: torch.device | str, checkpoint: bool = False) -> Program:
    rank, device = join(torch.device(device))
    layers, width, heads, length, vocabulary, batch = (
        (20, 1536, 12, 2048, 32000, 8) if size == "full" else (2, 32, 2, 16, 100, 2)
    )
    seeded(device)
    with device:
        gpt = GPT(layers, width, heads, length, vocabulary, checkpoint).to(torch.bfloat16)
    model = DistributedDataParallel(gpt, device_ids=[device.index] if device.type == "cuda" else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    generator = torch.Generator(device).manual_seed(1 + rank)

    def step() -> Tensor:
        tokens = torch.randint(vocabulary, (batch, length + 1), device=device, generator=generator)
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return Program((model,), (optimizer,), step)
