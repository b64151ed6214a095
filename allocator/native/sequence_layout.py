"""Where each request of one kind of period lies: what a layout is made of."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torch_tiers.allocator.sizes import PAGE

ELSEWHERE = 2**64 - 1
"""The offset of a request that has no place in the region."""


@dataclass(frozen=True)
class SequenceLayout:
    """The predicted requests of one kind of period, in order, and where each is to lie.

    Attributes
    ----------
    stream : int
        The stream of the requests.
    sizes : array of int64, shape (requests,)
        The most bytes of each request.
    offsets : array of uint64, shape (requests,)
        Bytes from the begin of the region; `ELSEWHERE` for a request that has no place in it.
    costs : array of int64, shape (pages,)
        What it would cost to have each page of the region in DRAM, in any unit: the cheapest lie there.
    vary : array of bool, shape (requests,), optional
        Which requests have other sizes in other periods, up to theirs here. These are told by their number alone.
    """

    stream: int
    sizes: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.uint64]
    costs: npt.NDArray[np.int64]
    vary: npt.NDArray[np.bool_] | None = None

    @property
    def least(self) -> npt.NDArray[np.int64]:
        """The least bytes of each request."""
        return self.sizes if self.vary is None else np.where(self.vary, 0, self.sizes)

    @property
    def total(self) -> int:
        """Bytes of the region, in whole pages."""
        return len(self.costs) * PAGE
