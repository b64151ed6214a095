"""Three small modules that are trained, and change on the way: what families of scenarios about that share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.scenarios import assert_same, batch, gradients

STEPS, AT = 12, 7  # and the step from which on a program is another one
WIDTH = 64


class Part(nn.Module):
    """Two linear layers, and something in between."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.last(self.between(self.first(x)))

    def between(self, x: Tensor) -> Tensor:
        return F.gelu(x)

    def later(self) -> None:
        """Change."""

    def kept(self) -> list[Tensor]:
        """What it has kept of its forwards, as tensors."""
        return []


def assert_same_later(
    part: Callable[[], Part], device: torch.device, *, forward: Callable[..., Tensor] | None = None, **arguments: Any
) -> None:
    """Check that training three of them is what it is without tiers, before and after they change."""

    def program(device: torch.device) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*(part() for _ in range(3))).to(device)
        optimizer, results = torch.optim.SGD(model.parameters(), lr=0.1), list[Tensor]()
        for i in range(STEPS):
            if i == AT:
                for each in model:
                    each.later()
            optimizer.zero_grad()
            x = batch(device, i, rows=256, width=WIDTH)
            loss = (model(x) if forward is None else forward(model, x, i)).square().mean()
            loss.backward()
            results += [loss.detach(), *gradients(model)]
            optimizer.step()
        return results + [kept.to(device) for each in model for kept in each.kept()]

    assert_same(program, device, moves=False, **arguments)
