"""A diffusion transformer on latents: blocks whose norms are scaled, shifted and gated by time step and class."""

# mypy: no-warn-return-any
from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.zoo.program import Program, block, seeded


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return x * (1 + scale[:, None]) + shift[:, None]


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(c).chunk(6, dim=1)
        b, n, w = x.shape
        qkv = self.qkv(modulate(self.norm1(x), shift1, scale1))
        q, k, v = qkv.view(b, n, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, w)
        x = x + gate1[:, None] * self.proj(y)
        return x + gate2[:, None] * self.mlp(modulate(self.norm2(x), shift2, scale2))


class DiT(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, side: int, classes: int, checkpoint: bool) -> None:
        super().__init__()
        self.width, self.side, self.checkpoint = width, side, checkpoint
        self.patches = nn.Conv2d(4, width, 2, 2)
        self.positions = nn.Parameter(torch.randn(1, (side // 2) ** 2, width) * 0.02)
        self.time = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))
        self.classes = nn.Embedding(classes + 1, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))
        self.head = nn.Linear(width, 2 * 2 * 4)

    def forward(self, x: Tensor, t: Tensor, label: Tensor) -> Tensor:
        frequencies = torch.exp(-math.log(10_000) * torch.arange(128, device=t.device) / 128)
        angles = t[:, None].float() * frequencies
        c = self.time(torch.cat((angles.cos(), angles.sin()), dim=1)) + self.classes(label)
        x = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        for layer in self.blocks:
            x = block(self.checkpoint, layer, x, c)
        x = self.head(modulate(self.norm(x), *self.modulation(c).chunk(2, dim=1)))
        half = self.side // 2
        x = x.view(-1, half, half, 2, 2, 4).permute(0, 5, 1, 3, 2, 4)
        return x.reshape(-1, 4, self.side, self.side)


def make(size: str, device: torch.device | str, checkpoint: bool = False) -> Program:
    device = torch.device(device)
    layers, width, heads, side, classes, batch = (
        (24, 1024, 16, 32, 1000, 64) if size == "full" else (2, 64, 4, 8, 10, 4)
    )
    generator = seeded(device)
    with device:
        model = DiT(layers, width, heads, side, classes, checkpoint)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0, fused=True)

    def step() -> Tensor:
        latents = torch.randn(batch, 4, side, side, device=device, generator=generator)
        noise = torch.randn(batch, 4, side, side, device=device, generator=generator)
        label = torch.randint(classes, (batch,), device=device, generator=generator)
        label = torch.where(torch.rand(batch, device=device, generator=generator) < 0.1, classes, label)
        t = torch.rand(batch, device=device, generator=generator)
        mixed = torch.lerp(latents, noise, t[:, None, None, None])
        with torch.autocast(device.type, torch.bfloat16):
            velocity = model(mixed, 1000 * t, label)
        loss = F.mse_loss(velocity.float(), noise - latents)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return Program((model,), (optimizer,), step)
