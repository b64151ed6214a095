"""An extent of a store, in stripes: each lies in one piece in one directory's file, and has its checksum."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from torch_tiers.allocator.errors import CorruptionError
from torch_tiers.allocator.extents import Extent
from torch_tiers.allocator.nvme.checksum import Sum, sum_for
from torch_tiers.allocator.nvme.volume import Volume


@dataclass(slots=True, eq=False)
class Stripe:
    """One request's worth of an extent.

    Attributes
    ----------
    volume, extent
        Where it lies on disk.
    start
        Its first byte in the extent, and so in every block that the extent is moved from or to.
    written
        Whether its data is on disk.
    """

    volume: Volume
    extent: Extent
    start: int
    written: bool = False
    _sum_of: Sum | None = None
    _sum: int | None = None

    def of(self, block: torch.Tensor) -> torch.Tensor:
        """Return its part of `block`."""
        return block[self.start : self.start + self.extent.nbytes]

    def sum_up(self, part: torch.Tensor) -> None:
        """Remember the checksum of what is being written."""
        self._sum_of = sum_for(part)
        self._sum = self._sum_of(part)

    def verify(self, part: torch.Tensor) -> None:
        """Raise CorruptionError if `part` is not what was summed up."""
        assert self._sum_of is not None
        if (found := self._sum_of(part)) != self._sum:
            reason = f"checksum {found:#x} where {self._sum:#x} was written"
            where = self.volume.backend.path
            raise CorruptionError(where, self.extent.offset, self.extent.nbytes, "read", reason)


@dataclass(frozen=True, slots=True, eq=False)
class NvmeExtent:
    """The place of one block in a store.

    Attributes
    ----------
    nbytes
        Whole 4 KiB blocks: exactly what `NvmeStore.write` and `read` transfer.
    stripes
        Where they lie, in their order.
    """

    nbytes: int
    stripes: tuple[Stripe, ...] = field(repr=False)
