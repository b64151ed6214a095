"""Small programs, as their fields write them: a forward, and its loss."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Program = tuple[Callable[[], Tensor], nn.Module]


def mlp_with_dropout_under_autocast() -> Program:
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 4))
    x = torch.randn(6, 8)

    def forward() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.cross_entropy(model(x).float(), torch.arange(6) % 4)

    return forward, model


def convolution_and_batch_norm() -> Program:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    x = torch.randn(2, 3, 8, 8)
    return lambda: model(x).square().mean(), model


def lstm() -> Program:
    model = nn.LSTM(4, 5, num_layers=2, batch_first=True)
    x = torch.randn(2, 3, 4)
    return lambda: model(x)[0].sum(), model


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(8, 24), nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (2, 4)).transpose(1, 2) for each in self.qkv(self.norm(x)).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(-2))


def attention() -> Program:
    model = nn.Sequential(Attention(), Attention())
    x = torch.randn(2, 5, 8)
    return lambda: model(x).pow(2).sum(), model


def embedding() -> Program:
    model = nn.Sequential(nn.Embedding(10, 6), nn.Linear(6, 10))
    tokens = torch.arange(12).reshape(2, 6) % 10
    return lambda: F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()), model


def in_place_activations() -> Program:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.SiLU(inplace=True))
    x = torch.randn(3, 4)

    def forward() -> Tensor:
        out = model(x).clone()
        out[0] *= 2
        out.view(-1)[5:].add_(1)
        return out.sum()

    return forward, model


PROGRAMS = (
    mlp_with_dropout_under_autocast,
    convolution_and_batch_norm,
    lstm,
    attention,
    embedding,
    in_place_activations,
)


def step(program: Program) -> list[Tensor]:
    """The loss and all gradients of one step, always with the same random numbers."""
    forward, model = program
    model.zero_grad()
    torch.manual_seed(1)
    loss = forward()
    loss.backward()
    return [loss.detach(), *(each.grad for each in model.parameters() if each.grad is not None)]
