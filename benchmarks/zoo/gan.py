"""Two networks against each other in fp32: residual generator, discriminator with spectral norms, two optimizers."""

# mypy: no-warn-return-any
from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm

from benchmarks.zoo.program import Program, block, seeded


class Up(nn.Module):
    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm2d(inside), nn.BatchNorm2d(outside)
        self.conv1, self.conv2 = nn.Conv2d(inside, outside, 3, padding=1), nn.Conv2d(outside, outside, 3, padding=1)
        self.skip = nn.Conv2d(inside, outside, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(F.interpolate(F.relu(self.norm1(x)), scale_factor=2.0))
        h = self.conv2(F.relu(self.norm2(h)))
        return h + self.skip(F.interpolate(x, scale_factor=2.0))


class Down(nn.Module):
    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.conv1 = spectral_norm(nn.Conv2d(inside, outside, 3, padding=1))
        self.conv2 = spectral_norm(nn.Conv2d(outside, outside, 3, padding=1))
        self.skip = spectral_norm(nn.Conv2d(inside, outside, 1))

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv2(F.relu(self.conv1(F.relu(x))))
        return F.avg_pool2d(h, 2) + self.skip(F.avg_pool2d(x, 2))


class Generator(nn.Module):
    def __init__(self, width: int, levels: int, latent: int, checkpoint: bool) -> None:
        super().__init__()
        self.checkpoint, self.first = checkpoint, nn.Linear(latent, (width << levels) * 16)
        self.blocks = nn.ModuleList(Up(width << k + 1, width << k) for k in reversed(range(levels)))
        self.norm, self.last = nn.BatchNorm2d(width), nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        x = self.first(z).view(len(z), -1, 4, 4)
        for layer in self.blocks:
            x = block(self.checkpoint, layer, x)
        return self.last(F.relu(self.norm(x))).tanh()


class Discriminator(nn.Module):
    def __init__(self, width: int, levels: int, checkpoint: bool) -> None:
        super().__init__()
        self.checkpoint, self.first = checkpoint, spectral_norm(nn.Conv2d(3, width, 3, padding=1))
        self.blocks = nn.ModuleList(Down(width << k, width << k + 1) for k in range(levels))
        self.last = spectral_norm(nn.Linear(width << levels, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.blocks:
            x = block(self.checkpoint, layer, x)
        return self.last(F.relu(x).sum((2, 3)))


def make(size: str, device: torch.device | str, checkpoint: bool = False) -> Program:
    device = torch.device(device)
    width, levels, latent, batch = (64, 5, 128, 176) if size == "full" else (8, 2, 16, 2)
    side = 4 << levels
    generator = seeded(device)
    with device:
        painter = Generator(width, levels, latent, checkpoint)
        critic = Discriminator(width, levels, checkpoint)
    paints = torch.optim.Adam(painter.parameters(), lr=1e-4, betas=(0.0, 0.9))
    judges = torch.optim.Adam(critic.parameters(), lr=2e-4, betas=(0.0, 0.9))

    def step() -> Tensor:
        real = torch.rand(batch, 3, side, side, device=device, generator=generator) * 2 - 1
        noise = torch.randn(2, batch, latent, device=device, generator=generator)
        with torch.no_grad():
            fake = painter(noise[0])
        scores = critic(torch.cat((real, fake)))
        loss_of_critic = F.relu(1 - scores[:batch]).mean() + F.relu(1 + scores[batch:]).mean()
        loss_of_critic.backward()
        judges.step()
        judges.zero_grad(set_to_none=True)
        critic.requires_grad_(False)
        loss = -critic(painter(noise[1])).mean()
        loss.backward()
        critic.requires_grad_(True)
        paints.step()
        paints.zero_grad(set_to_none=True)
        return loss_of_critic.detach() + loss.detach()

    return Program((painter, critic), (paints, judges), step)
