"""Sizes in bytes: the units, how users write them, how we print them."""

from __future__ import annotations

import re
from decimal import Decimal

KiB = 1024
MiB = 1024 * KiB
GiB = 1024 * MiB
TiB = 1024 * GiB

PAGE = 2 * MiB
"""Unit of accounting and alignment in the memory tiers: what CUDA maps virtual memory by."""

_UNITS = {"b": 1, "kib": KiB, "mib": MiB, "gib": GiB, "tib": TiB}
_LIKELY = {unit[0]: unit for unit in ("KiB", "MiB", "GiB", "TiB")}
_MOST = 2**63  # past what any system counts in, and what can be written as a float
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE | re.ASCII)


def parse_size(text: str | int) -> int:
    """Read a size such as ``"24GiB"``, ``"512 MiB"``, ``"1.5GiB"`` or ``"4096"`` (bytes).

    Returns
    -------
    int
        Whole bytes, rounded down.

    Raises
    ------
    ValueError
        If `text` is no size; says what is accepted.
    """
    if isinstance(text, int) and not isinstance(text, bool) and 0 <= text < _MOST:
        return text
    if isinstance(text, str) and (match := _SIZE.fullmatch(text.strip())):
        number, unit = match.groups()
        factor = 1 if not unit and "." not in number else _UNITS.get(unit.lower())
        if factor is not None and (size := Decimal(number) * factor) < _MOST:
            return int(size)
    guess = f"; did you mean {likely}?" if (likely := likely_size(text)) else ""
    raise ValueError(f'{text!r} is not a size: write bytes, or a number and KiB, MiB, GiB or TiB: "24GiB"{guess}')


def likely_size(text: object) -> str | None:
    """What ``24GB``, ``24G`` or ``24Gi``, which are no sizes, likely stand for: ``24GiB``."""
    match = _SIZE.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None or (unit := _LIKELY.get(match[2][:1].upper())) is None:
        return None
    written = match[2].lower()
    return match[1] + unit if written in (unit[0].lower(), unit[0].lower() + "b", unit[:2].lower()) else None


def format_size(nbytes: int) -> str:
    """Write `nbytes` in its largest unit, with one decimal: ``"23.4 GiB"``; below 1 KiB ``"512 B"``."""
    if abs(nbytes) < KiB:
        return f"{nbytes} B"
    value = float(nbytes)
    for unit in ("KiB", "MiB", "GiB"):
        value /= 1024
        if abs(value) < 1023.95:  # what prints as 1024.0 belongs to the next unit
            return f"{value:.1f} {unit}"
    return f"{value / 1024:.1f} TiB"


def format_at_least(nbytes: int) -> str:
    """As `format_size`, but rounded up: whoever writes that down has not less."""
    text = format_size(nbytes)
    number, unit = text.split()
    if Decimal(number) * _UNITS[unit.lower()] >= nbytes:
        return text
    return f"{float(number) + 0.1:.1f} {unit}"


def round_up(n: int, to: int) -> int:
    """Return the smallest multiple of `to` that is not below `n`."""
    return -(-n // to) * to
