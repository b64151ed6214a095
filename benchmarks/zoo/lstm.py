"""A language model of LSTMs, in fp32: truncated backpropagation, the state goes on from step to step; SGD, clipped."""

# mypy: no-warn-return-any
from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.zoo.program import Program, block, seeded

State = list[tuple[Tensor, Tensor]]


class Model(nn.Module):
    def __init__(self, layers: int, width: int, vocabulary: int, dropout: float, checkpoint: bool) -> None:
        super().__init__()
        self.checkpoint = checkpoint
        self.embed, self.drop = nn.Embedding(vocabulary, width), nn.Dropout(dropout)
        self.layers = nn.ModuleList(nn.LSTM(width, width) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)
        self.head.weight = self.embed.weight
        nn.init.uniform_(self.embed.weight, -0.1, 0.1)

    def forward(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        x, ends = self.drop(self.embed(tokens)), []
        for layer, (h, c) in zip(self.layers, state, strict=True):
            x, end = block(self.checkpoint, self._layer, layer, x, h, c)
            ends.append(end)
        return self.head(x), ends

    def _layer(self, layer: nn.Module, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        out, end = layer(x, (h, c))
        return self.drop(out), end


def make(size: str, device: torch.device | str, checkpoint: bool = False) -> Program:
    device = torch.device(device)
    layers, width, vocabulary, length, batch = (4, 1536, 10000, 192, 320) if size == "full" else (2, 32, 100, 8, 4)
    generator = seeded(device)
    with device:
        model = Model(layers, width, vocabulary, 0.3, checkpoint)
        state: State = [(torch.zeros(1, batch, width), torch.zeros(1, batch, width)) for _ in range(layers)]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def step() -> Tensor:
        tokens = torch.randint(vocabulary, (length + 1, batch), device=device, generator=generator)
        logits, ends = model(tokens[:-1], state)
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[1:].flatten())
        loss.backward()
        state[:] = [(h.detach(), c.detach()) for h, c in ends]
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return Program((model,), (optimizer,), step)
