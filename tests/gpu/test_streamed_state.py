"""Optimizers whose state does not fit into the budget: they make the same steps within it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from torch_tiers.allocator.sizes import MiB

ROOT = Path(__file__).parents[2]
BUDGET = 1100 * MiB
WITH_MASTERS = 800 * MiB  # some of which have to lie in DRAM
PROGRAM = """
import copy
import sys
import torch
from torch import nn

torch.manual_seed(0)
torch.use_deterministic_algorithms(True)
name, how, kind, loaded = sys.argv[1:]
with torch.device("cuda"):
    layers = [nn.Linear(1024 + 64 * (i % 2), 1024 + 64 * ((i + 1) % 2)) for i in range(64)]
    large = nn.Linear(12288, 1024)  # whose state comes in chunks, the last one together with what follows
    model = nn.Sequential(large, *layers)  # 320 MiB
updated = model
if kind == "masters":  # the model in bf16, and what the optimizer updates in fp32
    updated, model = model, copy.deepcopy(model).bfloat16()
if kind == "fsdp2":
    from torch import distributed as dist
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
optimizer = getattr(torch.optim, name)(
    [{"params": list(updated[:20].parameters()), "lr": 1e-3}, {"params": list(updated[20:].parameters())}],
    lr=1e-4, **eval(how),
)
if loaded:  # as of a checkpoint
    numbers = torch.Generator().manual_seed(1)
    groups = optimizer.state_dict()["param_groups"]
    kept = {
        i: {"step": torch.tensor(5.0), **{k: torch.rand(p.shape, generator=numbers) for k in ("exp_avg", "exp_avg_sq")}}
        for i, p in enumerate(model.parameters())
    }
    if loaded == "to the gpu first":
        kept = {i: {k: v.cuda() if v.ndim else v for k, v in of.items()} for i, of in kept.items()}
    optimizer.load_state_dict({"state": kept, "param_groups": groups})
    del kept
inputs = [torch.randn(64, 12288, generator=torch.Generator().manual_seed(i)).cuda() for i in range(4)]
scaler = torch.amp.GradScaler(init_scale=1024.0)
for i in range(14):
    out = model(inputs[i % 4].to(next(model.parameters()).dtype))
    loss = out.float().square().mean() * (float("inf") if i == 9 else 1)
    scaler.scale(loss).backward()
    if kind == "masters":
        for weight, master in zip(model.parameters(), updated.parameters()):
            master.grad, weight.grad = weight.grad.float(), None
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(updated.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    if kind == "masters":
        with torch.no_grad():
            for weight, master in zip(model.parameters(), updated.parameters()):
                weight.copy_(master)
    print(loss.item().hex(), (norm.full_tensor() if kind == "fsdp2" else norm).item().hex())
state = [v for s in optimizer.state_dict()["state"].values() for v in s.values()]
for tensor in (*updated.parameters(), *state):
    numbers = (tensor.to_local() if hasattr(tensor, "to_local") else tensor).double()
    print(numbers.sum().item().hex(), numbers.square().sum().item().hex())
if kind == "fsdp2":
    dist.destroy_process_group()
"""


def run(arguments: tuple[str, str, str, str], **environ: str) -> subprocess.CompletedProcess[str]:
    plain = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "TIERS_PLAN_CACHE": "0"}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        cwd=ROOT,
        env={**os.environ, **plain, **environ},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "how", "kind", "loaded"),
    [
        ("AdamW", "{}", "", ""),
        ("AdamW", "{'fused': True}", "", ""),
        ("Adam", "{'foreach': False, 'amsgrad': True}", "", ""),
        ("AdamW", "{}", "fsdp2", ""),
        ("AdamW", "{'fused': True}", "fsdp2", ""),
        ("AdamW", "{}", "masters", ""),
        ("AdamW", "{'fused': True}", "masters", ""),
        ("AdamW", "{}", "", "loaded"),
        ("AdamW", "{'fused': True}", "", "to the gpu first"),
    ],
)
def test_state_that_does_not_fit_is_updated_as_it_would_be(
    name: str, how: str, kind: str, loaded: str, tmp_path: Path
) -> None:
    hbm = WITH_MASTERS if kind == "masters" else BUDGET
    budget = {"TIERS_HBM": str(hbm), "TIERS_DRAM": "8GiB", "TIERS_LEDGER": str(tmp_path / "ledger")}
    done = run(
        (name, how, kind, loaded),
        TIERS_ALLOCATOR="pages",
        TIERS_RUN=str(tmp_path / "run"),
        TIERS_LOG="info",
        **budget,
    )
    print(done.stderr)
    assert (done.returncode, done.stdout) == (0, run((name, how, kind, loaded)).stdout), done.stderr
    stats = json.loads((tmp_path / "run" / "stats.json").read_text())
    assert stats["moved"]["state_read"] == stats["moved"]["state_write"] > 0
    assert stats["state_in_dram"] > 0
    assert stats["peak"]["hbm"] <= 1.03 * hbm


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("how", "loaded"), [("{}", ""), ("{'fused': True}", ""), ("{}", "loaded"), ("{}", "to the gpu first")]
)
def test_state_that_dram_has_no_room_for_either_is_updated_as_it_would_be(
    how: str, loaded: str, tmp_path: Path
) -> None:
    budget = {"TIERS_HBM": str(BUDGET), "TIERS_DRAM": "256MiB", "TIERS_LEDGER": str(tmp_path / "ledger")}
    done = run(
        ("AdamW", how, "", loaded),
        TIERS_ALLOCATOR="pages",
        TIERS_RUN=str(tmp_path / "run"),
        TIERS_LOG="info",
        TIERS_NVME="3GiB",
        TIERS_NVME_PATH=str(tmp_path),
        **budget,
    )
    print(done.stderr)
    assert (done.returncode, done.stdout) == (0, run(("AdamW", how, "", loaded)).stdout), done.stderr
    stats = json.loads((tmp_path / "run" / "stats.json").read_text())
    assert stats["moved"]["disk_write"] > 0 < stats["moved"]["disk_read"]
