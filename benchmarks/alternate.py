"""Timing variants side by side, so that a clock that drifts does not decide which is faster."""

from __future__ import annotations

import os
import shutil
import subprocess
import timeit
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

RESAMPLES = 10_000


@dataclass(frozen=True, slots=True)
class Ratio:
    """A median ratio of times and the ends of its 95% bootstrap interval."""

    median: float
    low: float
    high: float


def self_timed(variants: Mapping[str, Callable[[], float]], rounds: int, *, warmup: int = 1) -> dict[str, list[float]]:
    """Run each variant once a round, in an order that turns, and return the seconds that each said it took."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for k in range(-warmup, rounds):
        for name in _turned(list(variants), k):
            took = variants[name]()
            if k >= 0:
                seconds[name].append(took)
    return seconds


def _turned(names: list[str], k: int) -> list[str]:
    # Whoever runs first in a round finds the card cooler: the order turns, so that each is first in turn.
    turn = k % len(names)
    return names[turn:] + names[:turn]


def median_ratio(times: list[float], base: list[float], *, seed: int = 0) -> Ratio:
    """Return the median over rounds of ``times / base`` with the 95% bootstrap interval of that median.

    Raises
    ------
    ValueError
        Unless both hold the same number of rounds, at least one.
    """
    if len(times) != len(base) or not times:
        raise ValueError(f"pairs of rounds are needed, not {len(times)} against {len(base)}")
    ratios = np.asarray(times) / np.asarray(base)
    picks = np.random.default_rng(seed).integers(len(ratios), size=(RESAMPLES, len(ratios)))
    low, high = np.quantile(np.median(ratios[picks], axis=1), [0.025, 0.975])
    return Ratio(float(np.median(ratios)), float(low), float(high))


def host_us(rounds: int = 5) -> float:
    """Microseconds that one core takes for a fixed piece of the interpreter's work, the fastest of some rounds.

    On some machines a core is half as fast at times, for seconds. A step that the host decides takes longer then.
    """
    return min(timeit.repeat(lambda: sum(range(20_000)), number=1, repeat=rounds)) * 1e6


def sm_clock(gpu: int = 0) -> int | None:
    """Return the SM clock of a GPU in MHz, or ``None`` where nvidia-smi is missing or cannot tell.

    `gpu` is PyTorch's number of it, of those in ``CUDA_VISIBLE_DEVICES``; all GPUs are taken to be of one kind, or the
    two count them in different orders.
    """
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    if shutil.which("nvidia-smi") is None or (visible and gpu >= len(visible)):
        return None
    query = [
        "nvidia-smi",
        f"--id={visible[gpu] if visible else gpu}",
        "--query-gpu=clocks.sm",
        "--format=csv,noheader,nounits",
    ]
    answer = subprocess.run(query, capture_output=True, text=True, check=False)
    text = answer.stdout.strip()
    return int(text) if answer.returncode == 0 and text.isdigit() else None
