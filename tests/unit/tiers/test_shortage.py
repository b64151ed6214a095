"""Several jobs of one user share a node's DRAM: who comes when nearly all of it is taken trains all the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.tiers.test_activation import ROOT, SMALL, START, TRAIN, python, tiered

HALF_WAY = """
for i in range(3):
    step(i)
{holds}
input()
for i in range(3, 6):
    step(i)
"""
HOLDS = """
from pathlib import Path
from torch_tiers.allocator.host.ledger import Ledger
assert Ledger(Path(os.environ["TIERS_LEDGER"])).open_account("dram", 1 << 50).claim(1 << 40)
"""
"""As if the first job had filled a large node: what its arena took of this one would not be enough for that."""


@pytest.mark.parametrize(
    ("policy", "dram", "holds"),
    [("move", {"TIERS_DRAM": "8MiB"}, ""), ("auto", {"TIERS_DRAM": "8MiB"}, ""), ("move", {}, HOLDS)],
    ids=["move", "auto", "default"],
)
def test_two_jobs_train_side_by_side_though_the_first_holds_nearly_all_dram(
    policy: str, dram: dict[str, str], holds: str, tmp_path: Path
) -> None:
    (tmp_path / "first.py").write_text(START + HALF_WAY.format(holds=holds))
    shared = {"TIERS_LEDGER": str(tmp_path / "ledger"), "TIERS_HBM": SMALL, "TIERS_ALLOCATOR": "torch", **dram}
    system = {"PATH": "/usr/bin:/bin", "XDG_CONFIG_HOME": "/nonexistent", "PYTHONPATH": str(ROOT)}
    first = subprocess.Popen(
        [sys.executable, str(tmp_path / "first.py")],
        cwd=ROOT,
        env={**system, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", **shared, "TIERS_POLICY": "move"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert first.stdout is not None
        losses = "".join(first.stdout.readline() for _ in range(3))
        second = python(TRAIN, **shared, TIERS_POLICY=policy)
        rest, errors = first.communicate("\n", timeout=120)
    finally:
        first.kill()
        first.communicate()
    plain = python(TRAIN).stdout
    assert (second.returncode, second.stdout) == (0, plain), second.stderr
    assert (first.returncode, losses + rest) == (0, plain), errors
    assert f"by pid {first.pid} (first.py)" in second.stderr
    assert second.stderr.count("tensors that it has no room for stay in hbm") == 1


def test_that_nothing_fits_below_hbm_is_said_before_the_first_step() -> None:
    forward = START + "\nmodel(torch.randn(8, 256))\n"
    said = tiered(forward, TIERS_POLICY="move", TIERS_DRAM="0").stderr
    assert "tier dram is full: 2.0 MiB requested, 0 B of 0 B in use; raise TIERS_DRAM" in said
    assert tiered(forward, TIERS_POLICY="auto", TIERS_DRAM="0").stderr == "", "which may need nothing below"
