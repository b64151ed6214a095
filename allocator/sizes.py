"""Sizes in bytes: the units, how users write them, how we print them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal

KiB = 1024
MiB = 1024 * KiB
GiB = 1024 * MiB
TiB = 1024 * GiB

PAGE = 2 * MiB
"""Unit of accounting and alignment in the memory tiers: what CUDA maps virtual memory by."""

_UNITS = {
    "b": 1,
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", 1)},
    **{f"{letter}i": 1024**power for power, letter in enumerate("kmgt", 1)},
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)},
    **{letter: 1000**power for power, letter in enumerate("kmgt", 1)},
}
_MOST = 2**63  # past what any system counts in, and what can be written as a float
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE | re.ASCII)
_SHARE = re.compile(r"(\d+(?:\.\d+)?)\s*%", re.ASCII)


def parse_size(text: str | int) -> int:
    """Read a size such as ``"24GiB"``, ``"512 MiB"``, ``"24GB"`` or ``"4096"`` (bytes).

    KiB, MiB, GiB and TiB, or Ki to Ti, count in powers of 1024; KB, MB, GB and TB, or K to T, in powers of 1000.

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
    raise ValueError(f'{text!r} is not a size: write bytes, or a number and a unit: "24GiB" or "24GB"')


@dataclass(frozen=True, slots=True)
class Share:
    """A part of what a program needs, in percent: above 0, and 100 at most."""

    percent: float

    def __str__(self) -> str:
        """Write it as the user does: ``60%``."""
        return f"{self.percent:g}%"

    def of(self, nbytes: int) -> int:
        """Return this part of so many bytes."""
        return int(nbytes * self.percent / 100)


def parse_share(text: str) -> Share | None:
    """Read a share such as ``"60%"``; None if it is none.

    Raises
    ------
    ValueError
        If it is not above 0, or above 100.
    """
    match = _SHARE.fullmatch(text.strip())
    if match is None:
        return None
    share = Share(float(match[1]))
    if not 0 < share.percent <= 100:
        raise ValueError(f"{text!r} is no share: write a percentage above 0 and up to 100, such as 60%")
    return share


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
