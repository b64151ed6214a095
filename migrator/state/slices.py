"""Cuts an optimizer's step into slices: some parameters each, with what is kept for them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from torch_tiers.allocator.sizes import MiB

SLICE = 64 * MiB  # of state: its copies take a millisecond, and its calls a fraction of that
ABREAST = 3  # slices: one comes, one is updated, one leaves
LARGEST = 1 / 16  # of the budget: state of one parameter that is larger, and not cut, is read where it lies
AT_ONCE = 512 * MiB  # of state that does not come: an optimizer may take as much again while it updates that

_Part = TypeVar("_Part")


def may_come(nbytes: int, budget: int) -> bool:
    """Whether the state of a parameter, or of a chunk, of so many bytes, is brought to HBM for its update."""
    return 0 < nbytes <= max(SLICE, budget * LARGEST)


def cut(parts: Sequence[_Part], sizes: Sequence[int], most: int) -> Iterator[list[_Part]]:
    """Yield slices of at most `most` bytes, in order; a larger part is one alone."""
    slice_: list[_Part] = []
    total = 0
    for part, nbytes in zip(parts, sizes, strict=True):
        if slice_ and total + nbytes > most:
            yield slice_
            slice_, total = [], 0
        slice_.append(part)
        total += nbytes
    if slice_:
        yield slice_


def slice_bytes(buffer: int) -> int:
    """The most bytes that a slice is to have in a buffer of so many."""
    return min(SLICE, buffer // ABREAST)


def buffer_bytes(sizes: Sequence[int]) -> int:
    """Return the cheapest size of a buffer for the state of parameters of these sizes, in bytes.

    Each byte of the buffer takes the place of a byte of state in HBM. A slice of which the buffer does not hold
    `ABREAST` comes when another has left, not meanwhile. The sum of both counts of bytes is least.
    """
    slices = [sum(slice_) for slice_ in cut(sizes, sizes, SLICE)]
    largest = max(slices, default=0)
    buffers = {largest, *(max(largest, ABREAST * nbytes) for nbytes in slices)}
    return min(buffers, key=lambda buffer: (buffer + _alone(slices, buffer), buffer))


def _alone(slices: Sequence[int], buffer: int) -> int:
    return sum(nbytes for nbytes in slices if ABREAST * nbytes > buffer)
