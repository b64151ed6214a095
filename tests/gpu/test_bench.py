"""`tiers bench` on a GPU: budgets are shares of what the plain program reserves, and peers run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(300)
def test_a_program_is_compared_with_itself_and_with_peers() -> None:
    command = [sys.executable, "-m", "benchmarks.zoo.run", "gpt", "--size", "cpu", "--steps", "40", "--device", "cuda"]
    words = ["--json", "--rounds", "1", "--hbm", "80%", "--peers", "--", *command]
    done = subprocess.run(
        [sys.executable, "-m", "torch_tiers", "bench", *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    told = {row["variant"]: row for row in json.loads(done.stdout)}
    assert [name for name, row in told.items() if row["left_out"]] == [
        f"compiled, saves {share}%" for share in (70, 40, 0)
    ]
    for name in ("plain", "tiers auto at 80%", "save_on_cpu", "static split at 80%"):
        assert told[name]["memory"] > 0 and 0 < told[name]["step"]["median"] < 10, name
    assert told["tiers auto at 80%"]["hbm"].endswith("iB"), "a share is told in bytes"
