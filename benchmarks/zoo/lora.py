"""A frozen decoder in bf16 with low-rank adapters, its blocks checkpointed, as most who fine-tune so have them.

Its own checkpointing goes one further: the output layer and the loss, too, a slice of the tokens at a time.
"""

# mypy: no-warn-return-any
from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.zoo.program import Program, block, seeded

# Layers, width, heads, width within, tokens, vocabulary, sequences.
FULL = (16, 2048, 16, 5632, 2048, 32000, 18)
SMALL = (2, 32, 2, 64, 16, 100, 2)


class Adapted(nn.Module):
    def __init__(self, inside: int, outside: int, rank: int = 16, dropout: float = 0.05) -> None:
        super().__init__()
        self.base = nn.Linear(inside, outside, bias=False, dtype=torch.bfloat16).requires_grad_(False)
        self.down, self.up = nn.Linear(inside, rank, bias=False), nn.Linear(rank, outside, bias=False)
        self.drop, self.scale = nn.Dropout(dropout), 32 / rank
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        added = self.up(self.down(self.drop(x).float())) * self.scale
        return self.base(x) + added.to(x.dtype)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.RMSNorm(width, dtype=torch.bfloat16).requires_grad_(False)
        self.norm2 = nn.RMSNorm(width, dtype=torch.bfloat16).requires_grad_(False)
        self.q, self.k, self.v, self.o = (Adapted(width, width) for _ in range(4))
        self.gate, self.up, self.down = Adapted(width, hidden), Adapted(width, hidden), Adapted(hidden, width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (m(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for m in (self.q, self.k, self.v))
        q, k = (h * cos + torch.cat((-h.chunk(2, -1)[1], h.chunk(2, -1)[0]), -1) * sin for h in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.o(y)
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    cos: Tensor
    sin: Tensor

    def __init__(self, layers: int, width: int, heads: int, hidden: int, length: int, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width, dtype=torch.bfloat16).requires_grad_(False)
        self.blocks = nn.ModuleList(Block(width, heads, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(width, dtype=torch.bfloat16).requires_grad_(False)
        self.head = nn.Linear(width, vocabulary, bias=False, dtype=torch.bfloat16).requires_grad_(False)
        nn.init.normal_(self.embed.weight, std=0.02)
        part = width // heads
        angles = torch.arange(length)[:, None] * 10_000 ** -(torch.arange(0, part, 2) / part)
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos", angles.cos().bfloat16())
        self.register_buffer("sin", angles.sin().bfloat16())

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.blocks:
            x = block(True, layer, x, self.cos, self.sin)
        return self.norm(x)

    def losses(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x).float(), targets, reduction="sum")


def make(size: str, device: torch.device | str, checkpoint: bool = False) -> Program:
    return make_of(FULL if size == "full" else SMALL, device, checkpoint)


def make_of(sizes: tuple[int, ...], device: torch.device | str, checkpoint: bool) -> Program:
    """The program of a decoder with so many layers, of such sizes: see `FULL`."""
    device = torch.device(device)
    layers, width, heads, hidden, length, vocabulary, batch = sizes
    generator = seeded(device)
    with device:
        model = Decoder(layers, width, heads, hidden, length, vocabulary)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-4, weight_decay=0.0)

    def step() -> Tensor:
        tokens = torch.randint(vocabulary, (batch, length + 1), device=device, generator=generator)
        x, targets = model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
        slices = 8 if checkpoint else 1
        parts = zip(x.chunk(slices), targets.chunk(slices), strict=True)
        losses = [block(checkpoint, model.losses, *part) for part in parts]
        loss = torch.stack(losses).sum() / len(targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return Program((model,), (optimizer,), step)
