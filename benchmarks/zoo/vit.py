"""ViT-B/16 from scratch: a class token, dropped paths, mixed images, autocast to bf16, AdamW after a warm-up."""

# mypy: no-warn-return-any
from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.zoo.program import Program, block, seeded


class DropPath(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.rate == 0:
            return x
        kept = x.new_empty(x.shape[0], 1, 1).bernoulli_(1 - self.rate)
        return x * kept / (1 - self.rate)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, drop: float) -> None:
        super().__init__()
        self.norm1, self.norm2, self.drop = nn.LayerNorm(width), nn.LayerNorm(width), DropPath(drop)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        x = x + self.drop(self.attention(h, h, h, need_weights=False)[0])
        return x + self.drop(self.mlp(self.norm2(x)))


class ViT(nn.Module):
    def __init__(
        self, layers: int, width: int, heads: int, side: int, patch: int, classes: int, checkpoint: bool
    ) -> None:
        super().__init__()
        self.checkpoint = checkpoint
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, (side // patch) ** 2 + 1, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, heads, 0.1 * k / layers) for k in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(len(x), -1, -1), x), dim=1) + self.positions
        for layer in self.blocks:
            x = block(self.checkpoint, layer, x)
        return self.head(self.norm(x)[:, 0])


def make(size: str, device: torch.device | str, checkpoint: bool = False) -> Program:
    device = torch.device(device)
    layers, width, heads, side, patch, classes, batch = (
        (12, 768, 12, 224, 16, 1000, 320) if size == "full" else (2, 64, 4, 32, 8, 10, 4)
    )
    generator = seeded(device)
    with device:
        model = ViT(layers, width, heads, side, patch, classes, checkpoint)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 100))

    def step() -> Tensor:
        images = torch.randn(batch, 3, side, side, device=device, generator=generator)
        labels = torch.randint(classes, (batch,), device=device, generator=generator)
        share = torch.rand((), device=device, generator=generator)
        images = torch.lerp(images, images.roll(1, 0), share)
        targets = torch.lerp(F.one_hot(labels, classes).float(), F.one_hot(labels.roll(1), classes).float(), share)
        with torch.autocast(device.type, torch.bfloat16):
            loss = F.cross_entropy(model(images), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return Program((model,), (optimizer,), step)
