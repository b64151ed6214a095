"""Gradient accumulation: two micro-batches of different lengths to one optimizer step."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.programs import Step, batch_generator

MICRO_BATCHES = (256, 192)


def build(seed: int, device: torch.device) -> tuple[nn.Module, Step]:
    """Build the model and its step, whose loss is the mean of the micro-batches' losses."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(64, 512), nn.LayerNorm(512), nn.ReLU(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 10)
    ).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(i: int) -> Tensor:
        generator = batch_generator(seed, i)
        optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=device)
        for size in MICRO_BATCHES:
            x = torch.randn(size, 64, generator=generator).to(device)
            labels = torch.randint(10, (size,), generator=generator).to(device)
            loss = F.cross_entropy(model(x), labels) / len(MICRO_BATCHES)
            loss.backward()
            total += loss.detach()
        optimizer.step()
        return total

    return model, step
