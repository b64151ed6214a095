"""Cuts an optimizer's step into slices: some parameters each, with what is kept for them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from torch_tiers.allocator.sizes import MiB

SLICE = 64 * MiB  # of state: the copies of one take a millisecond, and the calls for one a tenth of that
ABREAST = 3  # slices: one comes, one is updated, one leaves
LARGEST = 1 / 16  # of the budget: state of one parameter that is larger is read where it lies

_Part = TypeVar("_Part")


def buffer_bytes(sizes: Iterable[int], budget: int) -> int:
    """Bytes of HBM for slices of state whose parts have these sizes; 0 if no part may come."""
    largest = max((nbytes for nbytes in sizes if may_come(nbytes, budget)), default=0)
    return max(ABREAST * SLICE, largest) if largest else 0


def may_come(nbytes: int, budget: int) -> bool:
    """Whether the state of a parameter, of so many bytes, is brought to HBM for its update."""
    return 0 < nbytes <= max(SLICE, budget * LARGEST)


def cut(parts: Sequence[_Part], sizes: Sequence[int]) -> Iterator[list[_Part]]:
    """Yield slices of at most `SLICE` bytes, in order; a larger part is one alone."""
    slice_: list[_Part] = []
    total = 0
    for part, nbytes in zip(parts, sizes, strict=True):
        if slice_ and total + nbytes > SLICE:
            yield slice_
            slice_, total = [], 0
        slice_.append(part)
        total += nbytes
    if slice_:
        yield slice_
