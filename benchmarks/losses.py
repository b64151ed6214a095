"""Losses at budgets, step by step, beside those of the plain program: bit for bit the same or not.

``python -m benchmarks.losses --budgets 34GiB,28GiB,22GiB,16GiB --deterministic``
``python -m benchmarks.losses --workload resnet152 --budgets 11959009280``
``python -m benchmarks.losses --budgets 16GiB --policy auto --steps 24 --deterministic``

Each run is a process of its own, one after the other. The plain program runs twice, as one that does not equal itself
shows nothing. With ``--deterministic`` PyTorch refuses kernels that are not; the reference GPT needs that (cuDNN's
attention is deterministic on demand only), and ResNet-152 has kernels that it would refuse, though they are. Prints a
row for each run with the seconds of its last step; exits with 1 if losses differ.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]  # where benchmarks are found
PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class Run:
    """One process: what it is called, its losses as they are printed without rounding, and its steps in seconds."""

    name: str
    losses: Sequence[str]
    seconds: Sequence[float]


def train(workload: str, steps: int, *, tiny: bool, deterministic: bool) -> Run:
    """Train in this process."""
    import torch

    from benchmarks import workloads

    if deterministic:
        torch.use_deterministic_algorithms(True)
    cuda = torch.cuda.is_available()
    job = getattr(workloads, workload)("cuda" if cuda else "cpu", tiny=tiny)
    losses, seconds = [], []
    for _ in range(steps):
        start = time.perf_counter()
        losses.append(job.step().item().hex())
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return Run("", losses, seconds)


def run(name: str, words: Sequence[str], variables: dict[str, str]) -> Run:
    """Train in a process of its own, under these variables."""
    command = [sys.executable, "-m", "benchmarks.losses", "--worker", *words]
    environ = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", **variables}
    done = subprocess.run(command, env=environ, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    told = json.loads(done.stdout.splitlines()[-1])
    return Run(name, told["losses"], told["seconds"])


def row(one: Run, plain: Run) -> str:
    """What became of a run beside the plain one."""
    differ = [k for k, (a, b) in enumerate(zip(one.losses, plain.losses, strict=True)) if a != b]
    same = f"differ from step {differ[0]} on" if differ else f"the same in all of {len(one.losses)} steps"
    last = float.fromhex(one.losses[-1])
    return f"{one.name:24} {same}; the last {last:.6f}, in {one.seconds[-1]:.3f} s"


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="reference_gpt")
    parser.add_argument("--budgets", default="16GiB", help="of HBM, comma-separated")
    parser.add_argument("--allocator", default="pages")
    parser.add_argument("--policy", default="keep")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="the small variant, on a CPU; tells nothing")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        told = train(options.workload, options.steps, tiny=options.tiny, deterministic=options.deterministic)
        print(json.dumps({"losses": told.losses, "seconds": told.seconds}))
        return 0
    words = ["--workload", options.workload, "--steps", str(options.steps)]
    words += [f"--{name}" for name in ("deterministic", "tiny") if getattr(options, name)]
    plain = run(PLAIN, words, {})
    runs = [run("plain, once more", words, {})]
    print(row(runs[0], plain), flush=True)
    for budget in options.budgets.split(","):
        variables = {"TIERS_ALLOCATOR": options.allocator, "TIERS_POLICY": options.policy, "TIERS_HBM": budget}
        runs.append(run(f"{options.policy} at {budget}", words, variables))
        print(row(runs[-1], plain), flush=True)
    return int(any(one.losses != plain.losses for one in runs))


if __name__ == "__main__":
    sys.exit(main())
