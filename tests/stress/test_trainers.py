"""Other people's trainers, on a CPU: losses and weights are those of the plain run, bit for bit; ten minutes.

What runs them is in `tests.trainers`. One whose packages are not installed, or do not fit each other, is skipped: no
extra installs them. PEFT and torchtune want different versions of torchao, so that no environment runs all.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trainers.small import STEPS

ROOT = Path(__file__).parents[2]
QUIET = {"TQDM_DISABLE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
LAUNCHED = "accelerate.commands.launch --num_processes 1 --cpu -m"

TRAINERS = {
    "hf_trainer": "40MiB",
    "trl_sft": "40MiB",
    "trl_sft 4bit": "30MiB",
    "qlora 4bit": "30MiB",
    "qlora 8bit": "30MiB",
    "qlora checkpointed": "5MiB",
    "qlora reentrant": "5MiB",
    "qlora 4bit streamed": "1MiB",
    "qlora 8bit streamed": "1MiB",
    "qlora checkpointed streamed": "1MiB",
    "torchao_lora streamed": "1MiB",
    "adamw8bit": "40MiB",
    "lightning_fit": "40MiB",
    "accelerate_loop": "40MiB",
    "accelerate_loop launched": "40MiB",
    "torchtune_recipe lora_finetune_single_device": "35MiB",
    "torchtune_recipe full_finetune_single_device": "40MiB",
    "torchtitan_parts none whole": "120MiB",
    "torchtitan_parts none chunked": "120MiB",
    "torchtitan_parts selective whole": "110MiB",
    "torchtitan_parts full whole": "104MiB",
}
"""A budget below what it takes plainly, or below what its weights take, by program and its words."""
STEPS_OF = {"hf_trainer": STEPS * 3 // 2}  # half of a run is made again, from a checkpoint


@pytest.mark.stress
@pytest.mark.timeout(600)
@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_trainer_has_the_losses_of_the_plain_run(trainer: str, tmp_path: Path) -> None:
    done = run(trainer, tmp_path / "plain", {})
    for line in done.stderr.splitlines() if done.returncode else ():
        if line.startswith(("ImportError", "ModuleNotFoundError")):
            pytest.skip(line)
    assert done.returncode == 0, done.stderr
    expected, known = results(done), warnings(done)
    ours = {"TIERS_ALLOCATOR": "torch", "TIERS_HBM": TRAINERS[trainer], "TIERS_RUN": str(tmp_path / "run")}
    done = run(trainer, tmp_path / "ours", ours)
    assert done.returncode == 0, done.stderr
    assert results(done) == expected and len(expected) > STEPS
    new = {line for line in warnings(done) - known if "streamed" not in trainer or "no plan keeps" not in line}
    assert not new  # a budget that the weights exceed is too small for all else
    stats = json.loads((tmp_path / "run/stats.json").read_text())
    print(f"{trainer}: {stats['moved']['d2h']} bytes moved in {stats['iterations']} iterations")
    assert stats["moved"]["d2h"] > 0
    assert "streamed" not in trainer or stats["moved"]["weights"] > 0
    assert stats["steps"] == STEPS_OF.get(trainer, STEPS)
    if "torchtitan" in trainer:  # also with a loss in chunks, each of which goes backward by itself
        assert stats["iterations"] == STEPS


def run(trainer: str, folder: Path, variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    folder.mkdir()
    name, *words = trainer.split()
    module = [*(LAUNCHED.split() if "launched" in words else ()), f"tests.trainers.{name}"]
    return subprocess.run(
        [sys.executable, "-m", *module, str(folder), *words],
        cwd=ROOT,
        env={**os.environ, **QUIET, **variables},
        capture_output=True,
        text=True,
    )


def results(done: subprocess.CompletedProcess[str]) -> list[str]:
    """The losses, and a hash of the weights."""
    return [line for line in done.stdout.splitlines() if line.startswith(("loss ", "weights "))]


def warnings(done: subprocess.CompletedProcess[str]) -> set[str]:
    return {line for line in done.stderr.splitlines() if "Warning" in line or line.startswith("tiers")}
