"""What `tiers report` says of the zoo's runs: what a step is predicted to take, beside what it took."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

IDEAL, PREDICTED, MEASURED = "ideal_s", "predicted_s", "measured_s"


def of_run(directory: Path) -> dict[str, float] | None:
    """Seconds of a step by the report on a run; None where nothing was predicted, or there is no run."""
    report = [sys.executable, "-m", "torch_tiers", "report", "--json", str(directory)]
    done = subprocess.run(report, capture_output=True, text=True, check=False)
    told: dict[str, Any] = json.loads(done.stdout) if done.returncode == 0 else {}
    answer = told.get("answer", {})
    if not answer.get(PREDICTED) or not answer.get(MEASURED):
        return None
    iterations = told["iterations"] / told["steps"]  # an iteration is a forward and its backward
    return {name: answer[name] * iterations for name in (IDEAL, PREDICTED, MEASURED) if answer[name] is not None}


def table(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Predicted steps in markdown: in brackets what the ideal is off plain's step, and what a step is off its own."""
    lines, off_plain, off = list[str](), list[float](), list[float]()
    for program, record in found.items():
        plain = record["rows"]["plain"]["step"]["median"]
        for variant, told in record.get("predicted", {}).items():
            off.append(told[MEASURED] / told[PREDICTED] - 1)
            ideal = ""
            if IDEAL in told:
                off_plain.append(told[IDEAL] / plain - 1)
                ideal = f"{1e3 * told[IDEAL]:.1f} ({off_plain[-1]:+.0%})"
            times = f"{1e3 * told[PREDICTED]:.1f} | {1e3 * told[MEASURED]:.1f} ({off[-1]:+.0%})"
            lines.append(f"| {program} | {variant} | {1e3 * plain:.1f} | {ideal} | {times} |")
    if not lines:
        return []
    summary = f"Predictions are {_errors(off)}; {sum(abs(one) > 0.1 for one in off)} of {len(off)} by more than 10%."
    summary += f" The ideal is {_errors(off_plain)}." if off_plain else ""
    head = ["| program | variant | plain, ms | the model's ideal | predicted | measured |", f"|{' --- |' * 6}"]
    return ["", *head, *lines, "", summary]


def _errors(off: Sequence[float]) -> str:
    return f"{median(map(abs, off)):.1%} off in the median, {max(map(abs, off)):.0%} at most"
