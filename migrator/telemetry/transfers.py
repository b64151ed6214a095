"""Timed copies, as lanes report them. Plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Transfer:
    """One copy that is over.

    Attributes
    ----------
    lane : str
        One of `migrator.model.links.LANES`.
    nbytes : int
        Size.
    begin, end : float
        Seconds, from when the lane was free to carry it out; comparable between lanes that were asked together.
    """

    lane: str
    nbytes: int
    begin: float
    end: float
