"""An unmodified program, killed at random moments of its run under tiers: what it leaves, and what it still holds."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from torch_tiers.allocator.host.ledger import Ledger
from torch_tiers.allocator.sizes import format_size
from torch_tiers.monitor import board

ROOT = Path(__file__).parents[1]
TIERS = ("dram", "nvme")


@dataclass(frozen=True)
class Row:
    """A line of the table of faults; `times` is how often the fault was met."""

    fault: str
    times: int
    happened: str
    lost: int = 0
    left: int = 0


def lost_bytes(found: list[bytes], expected: list[bytes]) -> int:
    """How many bytes of the results are others than expected."""
    return sum(a != b for one, other in zip(expected, found, strict=True) for a, b in zip(one, other, strict=True))


TRAINING = """
import runpy, sys, torch
from torch_tiers.autoload import gate
gate()
sys.argv = ["train_gpt.py", "--steps", "1000000", "--device", "cpu"]
runpy.run_path("examples/train_gpt.py", run_name="__main__")
"""


def kills(count: int = 50, seed: int | None = None) -> Row:
    """SIGKILL at random moments of an unmodified program's run."""
    seed = random.SystemRandom().randrange(2**32) if seed is None else seed
    print(f"seed of the kills: {seed}", file=sys.stderr)
    rng = random.Random(seed)
    delays = [rng.uniform(0, 2) for _ in range(count)]
    with ThreadPoolExecutor(2) as pool:
        outcomes = list(pool.map(kill_after, delays))
    held = {tier: [outcome[tier] for outcome in outcomes] for tier in TIERS}
    what = ", ".join(f"{format_size(min(held[tier]))} to {format_size(max(held[tier]))} of {tier}" for tier in TIERS)
    happened = f"held {what}; all of it given back to the ledger (seed {seed})"
    return Row(
        "SIGKILL at a random moment",
        count,
        happened,
        lost=sum(outcome["kept"] for outcome in outcomes),
        left=sum(outcome["left"] for outcome in outcomes),
    )


def kill_after(seconds: float) -> dict[str, int]:
    """Kill a run so long after its first step; what it held, bytes the ledger still counts then, and files left."""
    with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryDirectory() as accounts:
        environment = {
            **os.environ,
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",  # the program calls the gate itself, installed or not
            "PYTHONPATH": str(ROOT),
            "TIERS_ALLOCATOR": "torch",
            "TIERS_HBM": "48MiB",
            "TIERS_DRAM": "16MiB",
            "TIERS_NVME": "256MiB",
            "TIERS_NVME_PATH": directory,
            "TIERS_LEDGER": accounts,
            "OMP_NUM_THREADS": "1",
        }
        process = subprocess.Popen(
            [sys.executable, "-c", TRAINING],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        if not process.stdout.readline():
            raise RuntimeError(f"the program did not train: {process.communicate()[1]}")
        time.sleep(seconds)
        ledger = Ledger(Path(accounts))
        held = {tier: ledger.used(tier) for tier in TIERS}
        process.kill()
        process.communicate()
        kept = sum(ledger.used(tier) for tier in TIERS)
        board.read_all(Path(accounts))  # as the ledger, whoever looks next removes what the dead have left
        return {**held, "kept": kept, "left": len(os.listdir(directory)) + len(os.listdir(accounts))}
