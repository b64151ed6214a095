"""Each optimizer that is streamed makes the steps of plain PyTorch where its state does not fit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from torch_tiers.allocator.sizes import MiB

ROOT = Path(__file__).parents[2]
BUDGET = 1200 * MiB  # weights, their averages and gradients take 980
PROGRAM = """
import sys
from itertools import chain
import torch
from torch import nn, optim
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

torch.manual_seed(0)
torch.use_deterministic_algorithms(True)
name, how, first, last, path = sys.argv[1], eval(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
with torch.device("cuda"):
    layers = [nn.Linear(1024 + 64 * (i % 2), 1024 + 64 * ((i + 1) % 2)) for i in range(64)]
    large, frozen, rare = nn.Linear(12288, 1024), nn.Linear(1024, 1024), nn.Linear(1024, 1024)
body = nn.Sequential(large, frozen, *layers)
frozen.requires_grad_(False)
model = nn.ModuleList([body, rare])
trained = [p for p in model.parameters() if p.requires_grad]
matrices, vectors = [p for p in trained if p.ndim == 2], [p for p in trained if p.ndim == 1]
if name == "Muon":
    optimizers = [optim.Muon(matrices, **how), optim.AdamW(vectors)]
else:
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "lr": 1e-4}]
    optimizers = [getattr(optim, name)(groups, **{"lr": 1e-3, **how})]
schedulers = [optim.lr_scheduler.LambdaLR(each, lambda i: 1 / (1 + i)) for each in optimizers]
scaler = torch.amp.GradScaler(init_scale=1024.0, growth_interval=5)
ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
parts = [model, ema, scaler, *optimizers, *schedulers]
if first:
    for part, saved in zip(parts, torch.load(path, map_location="cpu")):
        part.load_state_dict(saved)
for i in range(first, last):
    for j in range(4):
        inputs = torch.randn(16, 12288, generator=torch.Generator().manual_seed(4 * i + j)).cuda()
        out = body(inputs)
        out = rare(out) if i % 3 else out
        loss = out.square().mean() / 4 * (float("inf") if (i, j) == (5, 2) else 1)
        scaler.scale(loss).backward()
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(trained, 1.0)
    for optimizer, scheduler in zip(optimizers, schedulers):
        scaler.step(optimizer)
        optimizer.zero_grad()
        scheduler.step()
    scaler.update()
    ema.update_parameters(model)
    print(loss.item().hex(), norm.item().hex())
if path and not first:
    torch.save([part.state_dict() for part in parts], path)
kept = chain.from_iterable(of.values() for optimizer in optimizers for of in optimizer.state_dict()["state"].values())
for tensor in (*model.parameters(), *ema.parameters(), *filter(torch.is_tensor, kept)):
    print(tensor.double().sum().item().hex(), tensor.double().square().sum().item().hex())
"""
FEW = {"Adafactor"}  # which keep sums of rows and columns alone
KINDS: list[tuple[str, dict[str, object]]] = [
    *((name, {}) for name in ("Adadelta", "Adafactor", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "Muon", "NAdam")),
    *((name, {}) for name in ("RAdam", "RMSprop", "Rprop")),
    ("SGD", {"momentum": 0.9}),
    ("SGD", {"momentum": 0.9, "nesterov": True, "foreach": False}),
    ("Adam", {"fused": True, "amsgrad": True}),
    ("Adam", {"foreach": False}),
    ("AdamW", {"fused": True, "maximize": True}),
    ("AdamW", {"foreach": False}),
    ("AdamW", {"capturable": True}),
    ("RMSprop", {"momentum": 0.5, "centered": True}),
    ("NAdam", {"foreach": False, "decoupled_weight_decay": True}),
]


def train(name: str, how: dict[str, object], first: int, last: int, path: Path | None, tiers: Path | None) -> str:
    """What the program prints, with tiers if `tiers` is a directory."""
    environ = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    if tiers is not None:
        tiers.mkdir(exist_ok=True)  # a ledger's own parents are not made
        environ |= {"TIERS_ALLOCATOR": "pages", "TIERS_HBM": str(BUDGET), "TIERS_DRAM": "8GiB", "TIERS_LOG": "info"}
        environ |= {"TIERS_RUN": str(tiers / "run"), "TIERS_LEDGER": str(tiers / "ledger"), "TIERS_PLAN_CACHE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, name, repr(how), str(first), str(last), str(path or "")],
        cwd=ROOT,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "how"), KINDS, ids=str)
def test_twelve_steps_are_plains(name: str, how: dict[str, object], tmp_path: Path) -> None:
    """With accumulation, clipping, a scaler that skips a step, schedulers, two groups, averages and frozen weights."""
    assert train(name, how, 0, 12, None, tmp_path) == train(name, how, 0, 12, None, None)
    stats = json.loads((tmp_path / "run" / "stats.json").read_text())
    assert stats["moved"].get("state_read", 0) > 0 or name in FEW
    assert stats["peak"]["hbm"] <= 1.03 * BUDGET


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("halves", [(True, False), (False, True), (True, True)], ids=str)
def test_a_run_is_resumed_with_or_without_tiers_in_each_half(halves: tuple[bool, bool], tmp_path: Path) -> None:
    def run(first: bool, second: bool) -> list[str]:
        where = tmp_path / f"{first} {second}"
        where.mkdir()
        saved = where / "saved"
        before = train("AdamW", {}, 0, 6, saved, where / "1" if first else None)
        return [before, train("AdamW", {}, 6, 12, saved, where / "2" if second else None)]

    assert run(*halves) == run(False, False)
