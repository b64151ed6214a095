"""Programs on two GPUs of one process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import tiers
from tests.programs import deterministic_kernels

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


class Halves(nn.Module):
    """A model whose first half is on GPU 0 and whose second half is on GPU 1."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)).to("cuda:0")
        self.second = nn.Sequential(nn.LayerNorm(512), nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 8)).to("cuda:1")

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).to("cuda:1"))


def train(steps: int) -> list[Tensor]:
    torch.manual_seed(0)
    model = Halves()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    results = []
    for step in range(steps):
        x = torch.randn(1024, 512, generator=torch.Generator().manual_seed(step)).to("cuda:0")
        loss = model(x).square().mean()
        loss.backward()
        results += [loss.detach().cpu(), *(p.grad.detach().cpu() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        assert torch.cuda.current_device() == 0
    return results


def test_a_model_on_two_gpus_trains_bit_for_bit_the_same() -> None:
    with deterministic_kernels():
        plain, again = train(6), train(6)
        assert all(map(torch.equal, plain, again))
        with tiers.session(policy="move", dram="1GiB") as session:
            moved = train(6)
    assert all(map(torch.equal, plain, moved))
    assert session.stats()["moved"]["h2d"] > 0
