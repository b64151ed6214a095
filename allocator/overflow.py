"""What HBM had no room for in a period. Plain data."""

from __future__ import annotations

from typing import NamedTuple


class Overflow(NamedTuple):
    """What HBM had no room for in the allocator's last period, and which that was.

    Attributes
    ----------
    nbytes : int
        The most bytes at once, wherever they came to lie.
    period : int or None
        The number of the period, which may have several iterations; None where each iteration is one.
    laid_out : bool
        Whether memory was laid out for the period, and it came so: without, more overflows than will.
    """

    nbytes: int = 0
    period: int | None = None
    laid_out: bool = True


FITS = Overflow()
SLIGHT = 0.005  # of the budget


def is_slight(in_dram: int, budget: int) -> bool:
    """Whether operators hardly take longer for so many bytes that they read and write in DRAM instead of HBM."""
    return in_dram <= SLIGHT * budget
