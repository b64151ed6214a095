"""Lifetimes: when the storage of a saved tensor is made, used and freed, in positions of the migrator's period.

A *position* is an event of the period (a tensor saved, a tensor asked for again), counted from
zero. Positions, not seconds: they repeat exactly from one period to the next, times do not.
Pure functions on plain data; nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Lifetime:
    """One storage over one period.

    Attributes
    ----------
    ident : int
        Names the storage within its trace.
    nbytes : int
        Size in bytes.
    birth : int
        Position at which it was first saved.
    uses : tuple of int
        Positions at which it was asked for again, ascending; empty when it never was.
    """

    ident: int
    nbytes: int
    birth: int
    uses: tuple[int, ...]

    @property
    def death(self) -> int:
        """Position after which nobody needs it."""
        return self.uses[-1] if self.uses else self.birth
