"""A Swin transformer: attention in windows, shifted in every second block, with a bias by relative position."""

# mypy: no-warn-return-any
from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.zoo.program import Program, block, seeded


class Block(nn.Module):
    mask: Tensor | None
    index: Tensor

    def __init__(self, width: int, heads: int, side: int, window: int, shifted: bool) -> None:
        super().__init__()
        self.heads, self.window, self.shift = heads, window, window // 2 if shifted and side > window else 0
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.bias = nn.Parameter(torch.randn((2 * window - 1) ** 2, heads) * 0.02)
        at = torch.stack(torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")).flatten(1)
        apart = (at[:, :, None] - at[:, None]) + window - 1
        self.register_buffer("index", apart[0] * (2 * window - 1) + apart[1])
        self.register_buffer("mask", self._mask(side) if self.shift else None)

    def _mask(self, side: int) -> Tensor:
        regions = torch.bucketize(torch.arange(side), torch.tensor([side - self.window, side - self.shift]), right=True)
        cut = self._windows((regions[:, None] * 3 + regions)[None, :, :, None]).squeeze(-1)
        return torch.where(cut[:, None] == cut[:, :, None], 0.0, -100.0)

    def _windows(self, x: Tensor) -> Tensor:
        b, h, w, c = x.shape
        x = x.view(b, h // self.window, self.window, w // self.window, self.window, c)
        return x.transpose(2, 3).reshape(-1, self.window**2, c)

    def attend(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        q, k, v = self.qkv(x).view(n, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = (q * (width // self.heads) ** -0.5) @ k.transpose(-2, -1)
        scores = scores + self.bias[self.index.flatten()].view(length, length, -1).permute(2, 0, 1)
        if self.mask is not None:
            scores = scores.view(-1, len(self.mask), self.heads, length, length) + self.mask[:, None]
            scores = scores.view(n, self.heads, length, length)
        return self.proj((scores.softmax(-1).to(v.dtype) @ v).transpose(1, 2).reshape(n, length, width))

    def forward(self, x: Tensor) -> Tensor:
        b, h, w, c = x.shape
        y = self.norm1(x)
        if self.shift:
            y = y.roll((-self.shift, -self.shift), (1, 2))
        y = self.attend(self._windows(y))
        y = y.view(b, h // self.window, w // self.window, self.window, self.window, c).transpose(2, 3).reshape(x.shape)
        if self.shift:
            y = y.roll((self.shift, self.shift), (1, 2))
        x = x + y
        return x + self.mlp(self.norm2(x))


class Merge(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.reduce = nn.LayerNorm(4 * width), nn.Linear(4 * width, 2 * width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        parts = [x[:, i::2, j::2] for j in (0, 1) for i in (0, 1)]
        return self.reduce(self.norm(torch.cat(parts, dim=-1)))


class Swin(nn.Module):
    def __init__(
        self, depths: tuple[int, ...], width: int, heads: int, side: int, window: int, classes: int, checkpoint: bool
    ) -> None:
        super().__init__()
        self.checkpoint, side = checkpoint, side // 4
        self.patches, self.norm0 = nn.Conv2d(3, width, 4, 4), nn.LayerNorm(width)
        self.layers = nn.ModuleList()
        for level, depth in enumerate(depths):
            if level:
                self.layers.append(Merge(width))
                width, heads, side = 2 * width, 2 * heads, side // 2
            self.layers.extend(Block(width, heads, side, window, bool(k % 2)) for k in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.norm0(self.patches(images).permute(0, 2, 3, 1))
        for layer in self.layers:
            x = block(self.checkpoint, layer, x)
        return self.head(self.norm(x).mean((1, 2)))


def make(size: str, device: torch.device | str, checkpoint: bool = False) -> Program:
    device = torch.device(device)
    depths, width, heads, side, window, classes, batch = (
        ((2, 2, 6, 2), 96, 3, 224, 7, 1000, 384) if size == "full" else ((2, 2), 24, 3, 32, 4, 10, 2)
    )
    generator = seeded(device)
    with device:
        model = Swin(depths, width, heads, side, window, classes, checkpoint)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.05)

    def step() -> Tensor:
        images = torch.randn(batch, 3, side, side, device=device, generator=generator)
        labels = torch.randint(classes, (batch,), device=device, generator=generator)
        with torch.autocast(device.type, torch.bfloat16):
            loss = F.cross_entropy(model(images), labels, label_smoothing=0.1)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return Program((model,), (optimizer,), step)
