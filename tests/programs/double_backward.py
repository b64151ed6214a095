"""A critic with a gradient penalty: the loss holds a gradient that was taken with ``create_graph=True``."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.programs import Step, batch_generator


def build(seed: int, device: torch.device) -> tuple[nn.Module, Step]:
    """Build the model and its step, which tells smooth images from noise."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.SiLU(),
        nn.Conv2d(16, 16, 3, stride=2, padding=1),
        nn.SiLU(),
        nn.Flatten(),
        nn.Linear(16 * 16 * 16, 64),
        nn.Tanh(),
        nn.Linear(64, 1),
    ).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)

    def step(i: int) -> Tensor:
        generator = batch_generator(seed, i)
        noise = torch.randn(8, 3, 32, 32, generator=generator).to(device)
        smooth = torch.rand(8, 3, 1, 1, generator=generator).to(device).expand_as(noise)
        optimizer.zero_grad(set_to_none=True)
        between = ((noise + smooth) / 2).requires_grad_()
        (slope,) = torch.autograd.grad(model(between).sum(), between, create_graph=True)
        penalty = (slope.flatten(1).norm(dim=1) - 1).square().mean()
        loss = model(noise).mean() - model(smooth).mean() + 10 * penalty
        loss.backward()
        optimizer.step()
        return loss.detach()

    return model, step
