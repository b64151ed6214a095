"""`tiers bench` from end to end: programs of the zoo at their CPU presets, each in processes of its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from torch_tiers.cli.main import main

ROOT = Path(__file__).parents[3]
STEPS = 30


@pytest.mark.timeout(120)  # seconds, on two cores that other tests use, too
@pytest.mark.parametrize(
    ("name", "hbm", "policy"),
    # `auto` may move nothing of an lstm as small as this, which depends on how long a busy host took to record it.
    [("gpt", "2MiB", "auto"), ("lstm", "288KiB", "move")],
)
def test_a_program_of_the_zoo_is_compared(
    name: str, hbm: str, policy: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("TIERS_ALLOCATOR", "torch")
    command = [sys.executable, "-m", "benchmarks.zoo.run", name, "--size", "cpu", "--steps", str(STEPS)]
    words = ["--rounds", "1", "--hbm", hbm, "--policy", policy, "--peers", "--", *command]
    assert main(["bench", "--json", *words]) == 0
    told = {row["variant"]: row for row in json.loads(capsys.readouterr().out)}
    ran = {name: row for name, row in told.items() if not row["left_out"]}
    assert list(ran) == ["plain", f"tiers {policy} at {hbm}", "save_on_cpu"]
    for row in ran.values():
        assert row["losses"] in ("", "equal") and 0 < row["step"]["median"] < 10
    ours = ran[f"tiers {policy} at {hbm}"]
    assert ours["moved"] > 0 and ours["memory"] > 0, "nothing was moved, so nothing was compared"
    assert {row["reason"] for row in told.values() if row["left_out"]} == {
        "the program compiles nothing",
        "needs a GPU",
    }
