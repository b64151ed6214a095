"""A UNet: skip connections that live long, concatenation, group norm."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.programs import Step, batch_generator


def stage(width_in: int, width_out: int) -> nn.Sequential:
    """Return two convolutions, each with group norm and SiLU."""
    return nn.Sequential(
        nn.Conv2d(width_in, width_out, 3, padding=1),
        nn.GroupNorm(4, width_out),
        nn.SiLU(),
        nn.Conv2d(width_out, width_out, 3, padding=1),
        nn.GroupNorm(4, width_out),
        nn.SiLU(),
    )


class UNet(nn.Module):
    def __init__(self, widths: tuple[int, ...] = (8, 16, 32)) -> None:
        super().__init__()
        pairs = list(pairwise(widths))
        self.inward = stage(3, widths[0])
        self.down = nn.ModuleList(stage(a, b) for a, b in pairs)
        self.enlarge = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in reversed(pairs))
        self.up = nn.ModuleList(stage(2 * a, a) for a, _ in reversed(pairs))
        self.outward = nn.Conv2d(widths[0], 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inward(x)
        skips = []
        for down in self.down:
            skips.append(x)
            x = down(F.max_pool2d(x, 2))
        for enlarge, up in zip(self.enlarge, self.up, strict=True):
            x = up(torch.cat([enlarge(x), skips.pop()], dim=1))
        return self.outward(x)


def build(seed: int, device: torch.device) -> tuple[nn.Module, Step]:
    """Build the model and its step, which learns to remove noise."""
    torch.manual_seed(seed)
    model = UNet().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i: int) -> Tensor:
        generator = batch_generator(seed, i)
        clean = torch.rand(4, 3, 64, 64, generator=generator).to(device)
        noise = torch.randn(4, 3, 64, 64, generator=generator).to(device)
        optimizer.zero_grad(set_to_none=True)
        loss = F.mse_loss(model(clean + noise), noise)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return model, step
