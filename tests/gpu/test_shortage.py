"""Too little room below HBM on a GPU: training goes on beyond its budget, and says so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TRAIN = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(1024, 1024), nn.Tanh()))).cuda()
for i in range(8):
    model(torch.randn(16384, 1024, generator=torch.Generator().manual_seed(i)).cuda()).square().mean().backward()
    print(sum(p.grad.double().sum() for p in model.parameters()).item().hex())
    model.zero_grad()
"""


def train(**environ: str) -> subprocess.CompletedProcess[str]:
    command, plain = [sys.executable, "-c", TRAIN], {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, **plain, **environ}, capture_output=True, text=True, check=False
    )


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("allocator", ["torch", "pages"])
@pytest.mark.parametrize("policy", ["move", "auto"])
def test_it_trains_though_neither_hbm_nor_dram_has_room(allocator: str, policy: str, tmp_path: Path) -> None:
    """It saves 1 GiB, and has 600 MiB of HBM and 32 MiB of DRAM."""
    budget = {"TIERS_HBM": "600MiB", "TIERS_DRAM": "32MiB", "TIERS_LEDGER": str(tmp_path / "ledger")}
    if allocator == "pages":  # which has nowhere else to put what stays: its DRAM is what the GPU addresses
        budget["TIERS_HBM"] = "2GiB"
    done = train(TIERS_ALLOCATOR=allocator, TIERS_POLICY=policy, **budget)
    assert (done.returncode, done.stdout) == (0, train().stdout), done.stderr
