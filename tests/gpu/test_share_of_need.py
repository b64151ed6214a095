"""A budget that is a share of what the program needs, on a GPU: its later steps keep to it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import torch
from tests.scenarios import batch, perceptron

GPU = torch.device("cuda")
model = perceptron(GPU, width=1024, depth=24)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
losses = []
for i in range(40):
    if i == 30:
        torch.cuda.reset_peak_memory_stats()
    loss = model(batch(GPU, i % 4, rows=16384, width=1024)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item().hex())
print(torch.cuda.max_memory_reserved(), *losses)
"""


def run(**variables: str) -> tuple[int, list[str]]:
    """Run the program; return the most that it reserved in the last steps, and its losses."""
    environment = {**os.environ, **variables, "TIERS_PLAN_CACHE": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-2000:]
    peak, *losses = done.stdout.split()
    return int(peak), losses


@pytest.mark.gpu
@pytest.mark.timeout(400)
@pytest.mark.parametrize("allocator", ["torch", "pages"])
def test_later_steps_keep_to_the_share(allocator: str, tmp_path: Path) -> None:
    plain, expected = run()
    peak, losses = run(TIERS_ALLOCATOR=allocator, TIERS_HBM="60%", TIERS_RUN=str(tmp_path / "run"))
    assert losses == expected
    budget = json.loads((tmp_path / "run" / "stats.json").read_text())["budget"]["hbm"]
    assert 0.5 * plain < budget < 0.7 * plain
    assert peak <= budget
