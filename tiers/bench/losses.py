"""The losses that a program printed, and where two runs part."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

NUMBER = r"([-+]?(?:\d+\.?\d*(?:e[-+]?\d+)?|nan\b|inf\b))"
PATTERN = rf"""\bloss\b["']?\s*[:=]?\s*["']?{NUMBER}"""
"""What most programs print: ``loss 2.5``, ``loss: 2.5``, ``loss=2.5``, ``'loss': '2.5'``."""


def printed(text: str, pattern: str) -> list[float]:
    """Return the losses in what a program printed, in their order.

    Parameters
    ----------
    pattern : str
        A regular expression of which the first group, or all of it, is the number; in whatever case.

    Raises
    ------
    ValueError
        If it finds what is no number.
    """
    found = re.finditer(pattern, text, re.IGNORECASE)
    return [float(match[1] if match.re.groups else match[0]) for match in found]


def apart(losses: Sequence[float], others: Sequence[float]) -> tuple[int, float] | None:
    """Return the first place, from 1 on, where losses differ, and the largest relative difference; None if nowhere."""
    pairs = list(zip(losses, others, strict=False))
    differ = [k for k, (a, b) in enumerate(pairs, 1) if a != b and not (math.isnan(a) and math.isnan(b))]
    if not differ:
        return None
    return differ[0], max(_relative(*pairs[k - 1]) for k in differ)


def _relative(a: float, b: float) -> float:
    difference = abs(a - b) / max(abs(a), 1e-30)
    return math.inf if math.isnan(difference) else difference
