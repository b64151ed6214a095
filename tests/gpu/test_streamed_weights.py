"""Models whose weights alone take more HBM than the budget: they run within it, and compute the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from torch_tiers.allocator.sizes import GiB

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
import torch
from torch import nn

torch.manual_seed(0)
torch.use_deterministic_algorithms(True)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(2048, 4096), nn.Linear(4096, 2048)
        self.adapter = nn.Sequential(nn.Linear(2048, 8), nn.Linear(8, 2048))

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x))) + self.adapter(x)


with torch.device("cuda"):
    model = nn.Sequential(*(Block() for _ in range(24)))  # 1.5 GiB of weights
kind = sys.argv[1]
if kind == "adapters":
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("adapter" in name)
inputs = [torch.randn(512, 2048, generator=torch.Generator().manual_seed(i)).cuda() for i in range(4)]
if kind == "infers":
    with torch.inference_mode():
        for i in range(16):
            print(model(inputs[i % 4]).double().sum().item().hex())
    sys.exit()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
for i in range(16):
    loss = model(inputs[i % 4]).square().mean()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item().hex(), norm.item().hex())
"""


def run(kind: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command, plain = [sys.executable, "-c", PROGRAM, kind], {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, **plain, **environ}, capture_output=True, text=True, check=False
    )


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("kind", "hbm"), [("adapters", 1), ("infers", 1), ("trains", 2)])
def test_a_model_larger_than_the_budget_computes_the_same_within_it(kind: str, hbm: int, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    budget = {"TIERS_HBM": f"{hbm}GiB", "TIERS_DRAM": "12GiB", "TIERS_LEDGER": str(tmp_path / "ledger")}
    done = run(kind, TIERS_ALLOCATOR="pages", TIERS_RUN=str(directory), TIERS_LOG="info", **budget)
    print(done.stderr)
    assert (done.returncode, done.stdout) == (0, run(kind).stdout), done.stderr
    assert "streamed from dram" in done.stderr
    if kind != "infers":  # which leaves no run behind
        stats = json.loads((directory / "stats.json").read_text())
        assert stats["moved"]["weights"] > 0
        assert stats["peak"]["hbm"] <= 1.03 * hbm * GiB
