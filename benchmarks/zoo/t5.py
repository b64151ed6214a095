"""T5 in plain PyTorch: scores written out with a bias by distance, RMS norms in fp32, gated GELU, autocast to bf16."""

# mypy: no-warn-return-any
from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.zoo.program import Program, block, seeded


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.dropout = heads, nn.Dropout(0.1)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        nn.init.normal_(self.q.weight, std=(width * width // heads) ** -0.5)  # in place of a scale on the scores

    def forward(self, x: Tensor, source: Tensor, bias: Tensor) -> Tensor:
        q, k, v = (
            m(y).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for m, y in ((self.q, x), (self.k, source), (self.v, source))
        )
        scores = q @ k.transpose(-1, -2)
        scores = scores + bias
        weights = self.dropout(scores.float().softmax(-1).type_as(scores))
        return self.o((weights @ v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int, crosses: bool) -> None:
        super().__init__()
        self.norm1, self.attention = Norm(width), Attention(width, heads)
        self.norm2 = Norm(width) if crosses else None
        self.cross = Attention(width, heads) if crosses else None
        self.norm3, self.dropout = Norm(width), nn.Dropout(0.1)
        self.gate, self.up, self.down = (
            nn.Linear(*shape, bias=False) for shape in ((width, hidden), (width, hidden), (hidden, width))
        )

    def forward(self, x: Tensor, bias: Tensor, other: Tensor | None = None, none: Tensor | None = None) -> Tensor:
        y = self.norm1(x)
        x = x + self.dropout(self.attention(y, y, bias))
        if self.cross is not None and self.norm2 is not None:
            x = x + self.dropout(self.cross(self.norm2(x), other, none))
        y = self.norm3(x)
        y = self.dropout(F.gelu(self.gate(y), approximate="tanh") * self.up(y))
        return x + self.dropout(self.down(y))


class Stack(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, hidden: int, decodes: bool, checkpoint: bool) -> None:
        super().__init__()
        self.checkpoint, self.decodes = checkpoint, decodes
        self.layers = nn.ModuleList(Layer(width, heads, hidden, decodes) for _ in range(layers))
        self.distances, self.norm, self.dropout = nn.Embedding(32, heads), Norm(width), nn.Dropout(0.1)

    def bias(self, length: int, device: torch.device) -> Tensor:
        """Of each head by the distance between two words, exact when they are near; words to come do not count."""
        at = torch.arange(length, device=device)
        apart = at[None] - at[:, None]
        buckets, side = 32, torch.zeros_like(apart)
        if not self.decodes:
            buckets, side = 16, (apart > 0) * 16
        far = (-apart).clamp(min=0) if self.decodes else apart.abs()
        near = buckets // 2
        large = near + (far.clamp(min=1).float() / near).log() / math.log(128 / near) * (buckets - near)
        bucket = side + torch.where(far < near, far, large.long().clamp(max=buckets - 1))
        bias = self.distances(bucket).permute(2, 0, 1)
        return bias.masked_fill(apart > 0, -torch.inf)[None] if self.decodes else bias[None]

    def forward(self, x: Tensor, *other: Tensor) -> Tensor:
        bias, x = self.bias(x.shape[1], x.device), self.dropout(x)
        for layer in self.layers:
            x = block(self.checkpoint, layer, x, bias, *other)
        return self.dropout(self.norm(x))


class T5(nn.Module):
    def __init__(
        self, layers: int, width: int, heads: int, hidden: int, vocabulary: int, checkpoint: bool = False
    ) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary, bias=False)
        self.encoder = Stack(layers, width, heads, hidden, False, checkpoint)
        self.decoder = Stack(layers, width, heads, hidden, True, checkpoint)

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        heard = self.encoder(self.words(inputs))
        begun = F.pad(labels[:, :-1], (1, 0))
        return self.head(self.decoder(self.words(begun), heard, heard.new_zeros(())))


def make(size: str, device: torch.device | str, checkpoint: bool = False) -> Program:
    device = torch.device(device)
    width, layers, heads, vocabulary, batch, source, target = (
        (768, 12, 12, 32128, 24, 512, 256) if size == "full" else (64, 2, 4, 128, 2, 16, 8)
    )
    generator = seeded(device)
    with device:
        model = T5(layers, width, heads, 8 * width // 3, vocabulary, checkpoint)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> Tensor:
        inputs = torch.randint(1, vocabulary, (batch, source), device=device, generator=generator)
        labels = torch.randint(1, vocabulary, (batch, target), device=device, generator=generator)
        with torch.autocast(device.type, torch.bfloat16):
            loss = F.cross_entropy(model(inputs, labels).flatten(0, 1), labels.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return Program((model,), (optimizer,), step)
