"""A language model with mixtures of experts: two experts a token, found with nonzero; two lengths in turn."""

# mypy: no-warn-return-any
from __future__ import annotations

from itertools import cycle

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.zoo.program import Program, block, seeded


class Experts(nn.Module):
    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width)) for _ in range(experts)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tokens = x.flatten(0, 1)
        chances = self.router(tokens).float().softmax(-1)
        weights, chosen = chances.topk(2)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(tokens)
        for k, expert in enumerate(self.experts):
            rows, place = (chosen == k).nonzero(as_tuple=True)
            if rows.numel():
                made = expert(tokens[rows]) * weights[rows, place, None]
                out = out.index_add(0, rows, made.to(out.dtype))
        used = F.one_hot(chosen[:, 0], len(self.experts)).float().mean(0)
        return out.view_as(x), len(self.experts) * (used * chances.mean(0)).sum()


class Block(nn.Module):
    def __init__(self, width: int, heads: int, experts: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.experts = Experts(width, experts)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c))
        y, uneven = self.experts(self.norm2(x))
        return x + y, uneven


class Mixture(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, experts: int, vocabulary: int, checkpoint: bool) -> None:
        super().__init__()
        self.checkpoint = checkpoint
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads, experts) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x, uneven = self.embed(tokens), torch.zeros((), device=tokens.device)
        for layer in self.blocks:
            x, more = block(self.checkpoint, layer, x)
            uneven = uneven + more
        return self.head(self.norm(x)), uneven


def make(size: str, device: torch.device | str, checkpoint: bool = False) -> Program:
    device = torch.device(device)
    layers, width, heads, experts, vocabulary, batch, lengths = (
        (8, 1024, 16, 4, 16000, 20, (1024, 896)) if size == "full" else (2, 64, 2, 4, 100, 4, (32, 24))
    )
    generator = seeded(device)
    with device:
        model = Mixture(layers, width, heads, experts, vocabulary, checkpoint)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    turns = cycle(lengths)

    def step() -> Tensor:
        tokens = torch.randint(vocabulary, (batch, next(turns) + 1), device=device, generator=generator)
        with torch.autocast(device.type, torch.bfloat16):
            logits, uneven = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) + 0.01 * uneven
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return Program((model,), (optimizer,), step)
