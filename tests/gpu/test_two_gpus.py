"""Programs on two GPUs of one process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import torch_tiers as tiers
from tests.programs import deterministic_kernels
from tests.scenarios import moving

ROOT = Path(__file__).parents[2]

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
        with moving(dram="1GiB") as session:
            moved = train(6)
    assert all(map(torch.equal, plain, moved))
    assert session.stats()["moved"]["h2d"] > 0


def test_a_model_on_two_gpus_trains_bit_for_bit_the_same_on_our_pages(tmp_path: Path) -> None:
    with deterministic_kernels():
        plain = train(6)
    run(f"torch.save(train(6), {str(tmp_path / 'results')!r})")
    assert all(map(torch.equal, plain, torch.load(tmp_path / "results")))


def test_kernels_read_what_lies_on_our_pages_of_another_gpu() -> None:
    """A copy of what is not contiguous is a kernel of one GPU that reads the other's memory."""
    run("read_across()")


def run(statement: str) -> None:
    """In a process of its own: an allocator is chosen before CUDA starts."""
    program = f"from tests.gpu.test_two_gpus import *\nwith on_our_pages(): {statement}"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


def on_our_pages() -> tiers.session:
    torch.use_deterministic_algorithms(True)
    return tiers.session(allocator="pages", policy="keep", hbm="4GiB", dram="1GiB")


def read_across() -> None:
    before = torch.arange(1 << 22, device="cuda:0").view(2048, 2048)
    for source, target in (("cuda:0", "cuda:1"), ("cuda:1", "cuda:0")):
        x = before.to(source)
        assert torch.equal(x.t().to(target).cpu(), before.t().cpu())  # mapped before the two were peers
        after = torch.arange(1 << 25, device=source).view(4096, -1)  # and after
        assert torch.equal(after[:, ::3].to(target).cpu(), after[:, ::3].cpu())
