"""Best fit with coalescing over a line of bytes. Pure: no memory, no file, no lock."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

from torch_tiers.allocator.sizes import round_up


@dataclass(frozen=True, slots=True)
class Extent:
    """A run of bytes; both numbers are multiples of the alignment of the map that made it."""

    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        """Offset of the first byte behind it."""
        return self.offset + self.nbytes


class ExtentMap:
    """Hands out extents of ``[0, capacity)``.

    A request takes the smallest gap that holds it (the lowest one among equals), and a freed extent merges
    with the gaps on both sides, so no two gaps ever touch. A bisection finds a gap; inserting one shifts a
    list, which stays cheap for the thousands of gaps that a tier can have.

    Parameters
    ----------
    capacity
        Bytes; what does not fill a whole `align` at the end is never handed out.
    align
        Every offset and every length is a multiple of it.

    Notes
    -----
    Not thread-safe: the owner holds a lock.
    """

    def __init__(self, capacity: int, align: int) -> None:
        if capacity < 0 or align <= 0:
            raise ValueError(f"an extent map needs capacity >= 0 and align > 0, not {capacity} and {align}")
        self._align = align
        self._capacity = 0
        self._used = 0
        self._taken: dict[int, Extent] = {}  # by offset
        self._gaps: list[tuple[int, int]] = []  # (length, offset), ascending
        self._gap_at: dict[int, int] = {}  # offset -> length
        self._gap_before: dict[int, int] = {}  # end -> offset
        self.extend(capacity)

    @property
    def capacity(self) -> int:
        """Bytes handed out and free, in whole `align`."""
        return self._capacity

    @property
    def used(self) -> int:
        """Bytes handed out."""
        return self._used

    @property
    def tail_free(self) -> int:
        """Free bytes at the very end: what `extend` makes longer."""
        return self._capacity - self._gap_before.get(self._capacity, self._capacity)

    def allocate(self, nbytes: int) -> Extent | None:
        """Take an extent of at least `nbytes`, or return None if no gap holds it."""
        if nbytes <= 0:
            raise ValueError(f"an extent needs a positive size, not {nbytes}")
        nbytes = round_up(nbytes, self._align)
        index = bisect_left(self._gaps, (nbytes, 0))
        if index == len(self._gaps):
            return None
        length, offset = self._gaps.pop(index)
        self._forget(offset, length)
        if length > nbytes:
            self._insert(offset + nbytes, length - nbytes)
        extent = Extent(offset, nbytes)
        self._taken[offset] = extent
        self._used += nbytes
        return extent

    def free(self, extent: Extent) -> None:
        """Give `extent` back.

        Raises
        ------
        ValueError
            If it is not allocated: freed twice, or never handed out by this map.
        """
        if self._taken.get(extent.offset) is not extent:  # an equal one can be a stale handle
            raise ValueError(f"{extent} is not allocated: freed twice, or it belongs to another map")
        del self._taken[extent.offset]
        self._used -= extent.nbytes
        self._release(extent.offset, extent.nbytes)

    def extend(self, nbytes: int) -> None:
        """Add `nbytes` (rounded down to the alignment) at the end."""
        nbytes -= nbytes % self._align
        if nbytes:
            self._release(self._capacity, nbytes)
            self._capacity += nbytes

    def _release(self, offset: int, length: int) -> None:
        before = self._gap_before.get(offset)
        if before is not None:
            self._remove(before, offset - before)
            offset, length = before, length + offset - before
        after = self._gap_at.get(offset + length)
        if after is not None:
            self._remove(offset + length, after)
            length += after
        self._insert(offset, length)

    def _insert(self, offset: int, length: int) -> None:
        insort(self._gaps, (length, offset))
        self._gap_at[offset] = length
        self._gap_before[offset + length] = offset

    def _remove(self, offset: int, length: int) -> None:
        del self._gaps[bisect_left(self._gaps, (length, offset))]
        self._forget(offset, length)

    def _forget(self, offset: int, length: int) -> None:
        del self._gap_at[offset]
        del self._gap_before[offset + length]
