"""Cuts an optimizer's step into slices: some parameters each, with what is kept for them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from torch_tiers.allocator.sizes import MiB

SLICE = 64 * MiB  # of state: its copies take a millisecond, and its calls a fraction of that
ABREAST = 3  # slices: one comes, one is updated, one leaves
LARGEST = 1 / 16  # of the budget: state of one parameter that is larger, and not cut, is read where it lies
NUMBERS = SLICE // 8  # of a tensor on NVMe that make a part: of two in fp32 it fills a slice
IN_TRANSIT = 12 * SLICE  # bytes of DRAM for state on its way from and to NVMe: half of it is being written
AT_ONCE = 512 * MiB  # of state that does not come: an optimizer may take as much again while it updates that

_Part = TypeVar("_Part")


def largest(budget: int) -> int:
    """The most bytes of state that are brought to HBM at once, for a parameter that is not cut."""
    return max(SLICE, int(budget * LARGEST))


def in_chunks(nbytes: int) -> list[int]:
    """The bytes of each chunk of a parameter's state, where it is cut."""
    return [SLICE] * (nbytes // SLICE) + [nbytes % SLICE] * (nbytes % SLICE > 0)


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
    """Return the cheapest size of a buffer for parts of state of these sizes, in bytes.

    Each byte of the buffer takes the place of a byte of state in HBM. A slice waits for another to leave if the buffer
    does not hold `ABREAST` of its size. The sum of the buffer's bytes and of those that wait is least.
    """
    slices = [sum(slice_) for slice_ in cut(sizes, sizes, SLICE)]
    largest = max(slices, default=0)
    buffers = {largest, *(max(largest, ABREAST * nbytes) for nbytes in slices)}
    return min(buffers, key=lambda buffer: (buffer + _alone(slices, buffer), buffer))


def _alone(slices: Sequence[int], buffer: int) -> int:
    return sum(nbytes for nbytes in slices if ABREAST * nbytes > buffer)
