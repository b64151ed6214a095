"""Speech to text: convolutions and an encoder over 3,000 frames, read by a decoder through attention."""

# mypy: no-warn-return-any
from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.zoo.program import Program, block, seeded


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor, other: Tensor | None = None, causal: bool = False) -> Tensor:
        source = x if other is None else other
        q, k, v = (
            y.view(*y.shape[:2], self.heads, -1).transpose(1, 2)
            for y in (self.query(x), self.key(source), self.value(source))
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, crosses: bool) -> None:
        super().__init__()
        self.attention, self.norm1 = Attention(width, heads), nn.LayerNorm(width)
        self.cross = Attention(width, heads) if crosses else None
        self.norm2 = nn.LayerNorm(width) if crosses else None
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.norm3 = nn.LayerNorm(width)

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.norm1(x), causal=other is not None)
        if self.cross is not None and self.norm2 is not None:
            x = x + self.cross(self.norm2(x), other)
        return x + self.mlp(self.norm3(x))


class Whisper(nn.Module):
    positions: Tensor

    def __init__(
        self, layers: int, width: int, heads: int, frames: int, words: int, vocabulary: int, checkpoint: bool
    ) -> None:
        super().__init__()
        self.checkpoint = checkpoint
        self.conv1, self.conv2 = nn.Conv1d(80, width, 3, padding=1), nn.Conv1d(width, width, 3, 2, 1)
        rates = torch.exp(-math.log(10_000) * torch.arange(width // 2) / (width // 2 - 1))
        angles = torch.arange(frames // 2)[:, None] * rates
        self.register_buffer("positions", torch.cat((angles.sin(), angles.cos()), dim=1))
        self.encoder = nn.ModuleList(Block(width, heads, crosses=False) for _ in range(layers))
        self.middle = nn.LayerNorm(width)
        self.tokens = nn.Embedding(vocabulary, width)
        self.learned = nn.Parameter(torch.randn(words, width) * 0.01)
        self.decoder = nn.ModuleList(Block(width, heads, crosses=True) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, spectrogram: Tensor, words: Tensor) -> Tensor:
        x = F.gelu(self.conv2(F.gelu(self.conv1(spectrogram)))).transpose(1, 2) + self.positions
        for layer in self.encoder:
            x = block(self.checkpoint, layer, x)
        heard = self.middle(x)
        y = self.tokens(words) + self.learned[: words.shape[1]]
        for layer in self.decoder:
            y = block(self.checkpoint, layer, y, heard)
        return F.linear(self.norm(y), self.tokens.weight)


def make(size: str, device: torch.device | str, checkpoint: bool = False) -> Program:
    device = torch.device(device)
    layers, width, heads, frames, most, vocabulary, batch = (
        (12, 768, 12, 3000, 224, 51865, 28) if size == "full" else (2, 64, 4, 32, 8, 128, 2)
    )
    generator = seeded(device)
    with device:
        model = Whisper(layers, width, heads, frames, most, vocabulary, checkpoint)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.98), fused=True)

    def step() -> Tensor:
        spectrogram = torch.randn(batch, 80, frames, device=device, generator=generator)
        words = torch.randint(vocabulary, (batch, most + 1), device=device, generator=generator)
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(spectrogram, words[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), words[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return Program((model,), (optimizer,), step)
