"""Does a program train the same with tiers at a budget too small for it? ``scripts/demo`` shows both side by side.

``python -m benchmarks.demo --json``

It trains three times: without tiers; with tiers and all the memory there is, to learn what the program needs;
and with a part of that, and so little DRAM that some of what moves goes on to NVMe. Exits with 1 if a loss
differs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.demo_report import Demo, Training, render
from torch_tiers.allocator.sizes import PAGE, MiB, format_size, parse_size, round_up

EXAMPLE = Path(__file__).parents[1] / "examples" / "train_gpt.py"
STEP = re.compile(r"^step \d+ loss (\S+) time (\S+) ms$", re.MULTILINE)
SHARE = 0.6
NVME = 512 * MiB


class DemoError(Exception):
    """A run of the demo failed; the text says which and why."""


def train(steps: int, scratch: Path, settings: Mapping[str, str]) -> Training:
    """Run the example in `scratch` with these settings of ours in its environment, and no others."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TIERS_")}
    command = [sys.executable, str(EXAMPLE), "--preset", "laptop", "--deterministic", "--steps", str(steps)]
    done = subprocess.run(
        command, cwd=scratch, env={**environment, **settings}, capture_output=True, text=True, check=False
    )
    found = STEP.findall(done.stdout)
    if done.returncode != 0 or len(found) != steps:
        shown = " ".join(f"{key}={value}" for key, value in settings.items())
        raise DemoError(
            f"train_gpt.py with {shown or 'no tiers'} ended with exit code {done.returncode} after "
            f"{len(found)} of {steps} steps:\n{done.stderr[-2000:]}"
        )
    return Training([loss for loss, _ in found], [float(ms) for _, ms in found])


def read_stats(run: Path) -> dict[str, Any]:
    """Return the statistics that a run with tiers left in its directory."""
    path = run / "stats.json"
    if not path.exists():
        raise DemoError("the run with tiers left no stats.json: is this project installed? Run scripts/setup.")
    stats: dict[str, Any] = json.loads(path.read_text())
    return stats


def choose_budget(needed: int, hbm: int | None) -> tuple[int, int]:
    """Return HBM and DRAM capacities in bytes such that DRAM takes about half of what HBM does not."""
    hbm = int(needed * SHARE) if hbm is None else hbm
    return hbm, max(PAGE, round_up((needed - hbm) // 2, PAGE))


def run_demo(steps: int, hbm: int | None, console: Console) -> Demo:
    """Train three times in a scratch directory under the current one, which is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="tiers-demo-", dir=Path.cwd()) as name:
        scratch = Path(name)
        with console.status("training without tiers"):
            plain = train(steps, scratch, {})
        with console.status("training with tiers and all the memory there is"):
            measured = {"TIERS_ALLOCATOR": "torch", "TIERS_RUN": str(scratch / "measured")}
            train(steps, scratch, measured)
            needed = read_stats(scratch / "measured")["peak"]["hbm"]
        hbm, dram = choose_budget(needed, hbm)
        (scratch / "nvme").mkdir()
        settings = {
            "TIERS_ALLOCATOR": "torch",
            "TIERS_HBM": str(hbm),
            "TIERS_DRAM": str(dram),
            "TIERS_NVME": str(NVME),
            "TIERS_NVME_PATH": str(scratch / "nvme"),
            "TIERS_RUN": str(scratch / "budget"),
        }
        with console.status(f"training with tiers in {format_size(hbm)} of the {format_size(needed)} needed"):
            tiers = train(steps, scratch, settings)
        return Demo(plain, tiers, needed, read_stats(scratch / "budget"))


def size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def main(argv: list[str] | None = None) -> int:
    """Run the demo and return its exit code."""
    parser = argparse.ArgumentParser(prog="demo", description="Train a small GPT without tiers and with them.")
    parser.add_argument("--steps", type=positive, default=12, metavar="N", help="steps to train (default: 12)")
    parser.add_argument("--hbm", type=size, help=f"budget such as 48MiB (default: {SHARE:.0%}% of what is needed)")
    parser.add_argument("--json", action="store_true", help="print what was seen as JSON instead of tables")
    arguments = parser.parse_args(argv)
    try:
        demo = run_demo(arguments.steps, arguments.hbm, Console(stderr=True))
    except DemoError as error:
        sys.stderr.write(f"demo: {error}\n")
        return 1
    if arguments.json:
        sys.stdout.write(json.dumps({"equal": demo.equal} | asdict(demo), indent=2) + "\n")
    else:
        Console().print(render(demo))
    return 0 if demo.equal else 1


if __name__ == "__main__":
    sys.exit(main())
