"""BERT, which fills in masked words of padded sentences: post-norm, dropout everywhere, autocast to bf16, AdamW."""

# mypy: no-warn-return-any
from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.zoo.program import Program, block, seeded

PAD, MASK, FIRST = 0, 4, 5


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.heads, self.rate, self.dropout = heads, dropout, nn.Dropout(dropout)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out, self.norm1 = nn.Linear(width, width), nn.LayerNorm(width, eps=1e-12)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm2 = nn.LayerNorm(width, eps=1e-12)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (m(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for m in (self.query, self.key, self.value))
        y = F.scaled_dot_product_attention(q, k, v, mask.to(q.dtype), self.rate if self.training else 0.0)
        x = self.norm1(x + self.dropout(self.out(y.transpose(1, 2).flatten(2))))
        return self.norm2(x + self.dropout(self.down(F.gelu(self.up(x)))))


class Bert(nn.Module):
    def __init__(
        self, layers: int, width: int, heads: int, length: int, vocabulary: int, checkpoint: bool = False
    ) -> None:
        super().__init__()
        self.checkpoint = checkpoint
        self.words, self.places = nn.Embedding(vocabulary, width, padding_idx=PAD), nn.Embedding(length, width)
        self.norm, self.dropout = nn.LayerNorm(width, eps=1e-12), nn.Dropout(0.1)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.head = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width, eps=1e-12))
        self.bias = nn.Parameter(torch.zeros(vocabulary))
        for embedding in (self.words, self.places):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, words: Tensor, real: Tensor) -> Tensor:
        places = torch.arange(words.shape[1], device=words.device)
        x = self.dropout(self.norm(self.words(words) + self.places(places)))
        mask = torch.zeros_like(real, dtype=x.dtype).masked_fill(~real, -1e4)[:, None, None, :]
        for layer in self.layers:
            x = block(self.checkpoint, layer, x, mask)
        return F.linear(self.head(x), self.words.weight, self.bias)


def sentences(count: int, length: int, vocabulary: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Words with some of them masked, which of them are no padding, and what was masked (elsewhere -100)."""
    device = generator.device
    words = torch.randint(FIRST, vocabulary, (count, length), device=device, generator=generator)
    lengths = torch.randint(length // 2, length + 1, (count, 1), device=device, generator=generator)
    real = torch.arange(length, device=device) < lengths
    hidden = (torch.rand(count, length, device=device, generator=generator) < 0.15) & real
    hidden[:, 0] = True
    return words.masked_fill(hidden, MASK).masked_fill(~real, PAD), real, words.masked_fill(~hidden, -100)


def make(size: str, device: torch.device | str, checkpoint: bool = False) -> Program:
    device = torch.device(device)
    width, layers, heads, vocabulary, batch, length = (
        (1024, 24, 16, 30522, 32, 512) if size == "full" else (64, 2, 4, 128, 2, 16)
    )
    generator = seeded(device)
    with device:
        model = Bert(layers, width, heads, length, vocabulary, checkpoint)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01)

    def step() -> Tensor:
        words, real, labels = sentences(batch, length, vocabulary, generator)
        with torch.autocast(device.type, torch.bfloat16):
            scores = model(words, real)
            loss = F.cross_entropy(scores.flatten(0, 1).float(), labels.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return Program((model,), (optimizer,), step)
