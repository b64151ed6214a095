"""A decoder as Llama has it, in bf16: rotated positions, fewer keys than queries, SwiGLU; gradients of two batches."""

# mypy: no-warn-return-any
from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.zoo.program import Program, block, seeded

ACCUMULATED = 2


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight * y.to(x.dtype)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.part = width // heads
        self.norm1, self.norm2 = Norm(width), Norm(width)
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = nn.Linear(width, width // 2, bias=False), nn.Linear(width, width // 2, bias=False)
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (m(y).unflatten(-1, (-1, self.part)).transpose(1, 2) for m in (self.q, self.k, self.v))
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, vocabulary: int, checkpoint: bool = False) -> None:
        super().__init__()
        self.checkpoint, self.part = checkpoint, width // heads
        self.words, self.norm = nn.Embedding(vocabulary, width), Norm(width)
        self.blocks = nn.ModuleList(Block(width, heads, 11 * width // 4) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        rates = 10_000 ** -(torch.arange(0, self.part, 2, device=x.device) / self.part)
        angles = torch.arange(words.shape[1], device=x.device)[:, None] * rates.repeat(2)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.blocks:
            x = block(self.checkpoint, layer, x, cos, sin)
        return self.head(self.norm(x))


def make(size: str, device: torch.device | str, checkpoint: bool = False) -> Program:
    device = torch.device(device)
    width, layers, heads, vocabulary, batch, length = (
        (2048, 16, 16, 32000, 6, 1024) if size == "full" else (64, 2, 4, 128, 1, 16)
    )
    generator = seeded(device)
    with device:
        model = Llama(layers, width, heads, vocabulary, checkpoint).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 50))

    def step() -> Tensor:
        total = torch.zeros((), device=device)
        for _ in range(ACCUMULATED):
            words = torch.randint(vocabulary, (batch, length + 1), device=device, generator=generator)
            logits = model(words[:, :-1]).float()
            loss = F.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten()) / ACCUMULATED
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return Program((model,), (optimizer,), step)
