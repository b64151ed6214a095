"""Denoising diffusion: a UNet told the time step, attention at the coarsest levels, an average of the weights."""

# mypy: no-warn-return-any
from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.zoo.program import Program, block, seeded


def embedding(t: Tensor, width: int) -> Tensor:
    frequencies = torch.exp(-math.log(10_000) * torch.arange(width // 2, device=t.device) / (width // 2))
    angles = t[:, None].float() * frequencies
    return torch.cat((angles.sin(), angles.cos()), dim=1)


class Residual(nn.Module):
    def __init__(self, inside: int, outside: int, time: int, attends: bool, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(8, inside), nn.Conv2d(inside, outside, 3, padding=1)
        self.time = nn.Linear(time, 2 * outside)
        self.norm2, self.conv2 = nn.GroupNorm(8, outside), nn.Conv2d(outside, outside, 3, padding=1)
        self.dropout = nn.Dropout(dropout)
        self.skip = nn.Conv2d(inside, outside, 1) if inside != outside else nn.Identity()
        self.norm3 = nn.GroupNorm(8, outside) if attends else None
        self.qkv = nn.Conv2d(outside, 3 * outside, 1) if attends else None
        self.out = nn.Conv2d(outside, outside, 1) if attends else None

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        scale, shift = self.time(F.silu(t))[:, :, None, None].chunk(2, dim=1)
        h = self.norm2(h) * (1 + scale) + shift
        x = self.skip(x) + self.conv2(self.dropout(F.silu(h)))
        if self.qkv is None or self.out is None or self.norm3 is None:
            return x
        b, c, height, width = x.shape
        q, k, v = self.qkv(self.norm3(x)).reshape(b, 3, c // 32 or 1, -1, height * width).transpose(3, 4).unbind(1)
        y = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(y.transpose(2, 3).reshape(b, c, height, width))


class UNet(nn.Module):
    def __init__(self, width: int, multiples: tuple[int, ...], checkpoint: bool = False) -> None:
        super().__init__()
        self.width, self.checkpoint, time = width, checkpoint, 4 * width
        widths = [width * m for m in multiples]
        self.time = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        self.shrink = nn.ModuleList(nn.Conv2d(w, w, 3, 2, 1) for w in widths[:-1])
        self.grow = nn.ModuleList(nn.Conv2d(w, w, 3, padding=1) for w in reversed(widths[1:]))
        now, skips = width, [width]
        for level, w in enumerate(widths):
            for _ in range(2):
                self.down.append(Residual(now, w, time, attends=level >= 2))
                now = w
                skips.append(now)
            if level < len(widths) - 1:
                skips.append(now)
        self.middle = Residual(now, now, time, attends=True)
        for level, w in reversed(list(enumerate(widths))):
            for _ in range(3):
                self.up.append(Residual(now + skips.pop(), w, time, attends=level >= 2))
                now = w
        self.last = nn.Sequential(nn.GroupNorm(8, width), nn.SiLU(), nn.Conv2d(width, 3, 3, padding=1))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        t = self.time(embedding(t, self.width))
        x = self.first(x)
        skips, down, up = [x], iter(self.down), iter(self.up)
        for level in range(len(self.shrink) + 1):
            for _ in range(2):
                x = block(self.checkpoint, next(down), x, t)
                skips.append(x)
            if level < len(self.shrink):
                x = self.shrink[level](x)
                skips.append(x)
        x = block(self.checkpoint, self.middle, x, t)
        for level in range(len(self.grow) + 1):
            for _ in range(3):
                x = block(self.checkpoint, next(up), torch.cat((x, skips.pop()), dim=1), t)
            if level < len(self.grow):
                x = self.grow[level](F.interpolate(x, scale_factor=2.0, mode="nearest"))
        return self.last(x)


def make(size: str, device: torch.device | str, checkpoint: bool = False) -> Program:
    device = torch.device(device)
    width, multiples, batch, side = (128, (1, 2, 2, 4), 160, 64) if size == "full" else (16, (1, 1, 2), 1, 16)
    generator = seeded(device)
    with device:
        model = UNet(width, multiples, checkpoint)
        kept = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000), dim=0)
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> Tensor:
        images = torch.rand(batch, 3, side, side, device=device, generator=generator) * 2 - 1
        noise = torch.randn(batch, 3, side, side, device=device, generator=generator)
        t = torch.randint(1000, (batch,), device=device, generator=generator)
        signal = kept[t][:, None, None, None]
        with torch.autocast(device.type, torch.bfloat16):
            predicted = model(signal.sqrt() * images + (1 - signal).sqrt() * noise, t)
        loss = F.mse_loss(predicted.float(), noise)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 1e-3)
        return loss.detach()

    return Program((model, average), (optimizer,), step)
