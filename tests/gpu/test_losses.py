"""Losses are kept on the GPU that computed them: no backward waits for that, and nothing is copied over the link."""

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
from torch_tiers.migrator.program.losses import Losses
losses = Losses()
losses.install()
model = nn.Linear(64, 64).cuda()
printed = []
inputs = [torch.randn(8, 64).cuda() for _ in range(4)]
torch.cuda.set_sync_debug_mode("error")
for x in inputs:
    loss = model(x).square().mean()
    loss.backward()
    printed.append(loss.detach())
torch.cuda.set_sync_debug_mode("default")
losses.uninstall()
assert losses.read() == [(1, each.item()) for each in printed], losses.read()
"""
GRAPH = """
import torch
from torch_tiers.migrator.program.losses import Losses
losses = Losses()
losses.install()
weight = torch.ones(4, device="cuda", requires_grad=True)
stream = torch.cuda.Stream()
with torch.cuda.stream(stream):
    weight.sum().backward()
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, stream=stream):
    weight.sum().backward()
graph.replay()
losses.uninstall()
assert losses.read() == [(1, 4.0)], losses.read()
"""


@pytest.mark.gpu
@pytest.mark.timeout(120)
@pytest.mark.parametrize("program", [TRAIN, GRAPH], ids=["plain", "captured"])
def test_losses_are_kept_without_a_wait_and_not_within_a_captured_graph(program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env={**os.environ}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
