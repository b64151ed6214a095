"""Which kinds of periods a program has, where they are not all alike, and which of them to lay out. Pure.

A program with sequences of several lengths has a kind for each. A kind is its requests' sizes, in order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torch_tiers.allocator.layout.packing import Ints
from torch_tiers.allocator.layout.sequence import TOLERATED, TOLERATED_SHARE, Largest, Log
from torch_tiers.allocator.native.sequence_layout import SequenceLayout

MOST = 8  # kinds to remember: the layout is made for all of them that come back
MANY = MOST + 4  # periods of no known kind: there are more than can be laid out one by one
REMEMBERED = 64  # periods without a kind until it is forgotten, and what it alone had memory for


@dataclass(eq=False)
class _Kind:
    sizes: Ints
    predicted: SequenceLayout
    seen: int  # the period in which it came last
    returned: bool = False
    vary: npt.NDArray[np.bool_] | None = None  # which sizes are others in other periods of it

    def has(self, sizes: Ints) -> bool:
        """Whether a period with requests of these sizes is of this kind."""
        if len(sizes) != len(self.sizes):
            return False
        differs = sizes != self.sizes
        different = np.count_nonzero(differs if self.vary is None else differs & ~self.vary)
        return bool(different <= min(max(TOLERATED, TOLERATED_SHARE * len(sizes)), len(sizes) // 8))


class Kinds:
    """Remembers the last kinds of periods, and what each is predicted to request.

    A kind has *returned* when it came again after another. The layout is made for the last kind and all that have
    returned. Kinds that came and went, as a program's first steps do, take no memory in it.
    """

    def __init__(self) -> None:
        self._period = 0
        self._known: list[_Kind] = []
        self._laid_out: list[_Kind] = []
        self._present: _Kind | None = None  # of the last period
        self._unknown = 0  # periods that were of no known kind

    def period_over(self, log: Log) -> bool:
        """Count a period; whether a kind that was laid out is forgotten, so that its memory can be released."""
        self._period += 1
        self._present = self._kind_of(log.requests["bytes"].astype(np.int64))
        self._unknown += self._present is None
        return self._came()

    @property
    def are_many(self) -> bool:
        """Whether there are more kinds than can be laid out one by one, as where some sizes never come again."""
        return self._unknown >= MANY

    @property
    def total(self) -> int:
        """Bytes of the region for all that are laid out."""
        return max((kind.predicted.total for kind in self._laid_out), default=0)

    def forget(self) -> None:
        """Forget all kinds: none comes again, and each would take its memory in every layout."""
        self._known.clear()
        self._laid_out.clear()
        self._present = None

    def is_whole(self, number: int, requests: int) -> bool:
        """Whether layout `number` has exactly so many requests. If not, it was the begin of another with the same."""
        return number < len(self._laid_out) and len(self._laid_out[number].predicted.sizes) == requests

    def came_as_laid_out(self, number: int) -> bool:
        """Count a period that came exactly as layout `number`; see `period_over`."""
        self._period += 1
        self._present = self._laid_out[number]
        return self._came()

    def came_as_before(self) -> bool:
        """Count a period that repeated the last; see `period_over`."""
        self._period += 1
        return self._came()

    @property
    def may_return(self) -> bool:
        """Whether a kind other than the last period's has returned: it may be forgotten, and its memory released."""
        return any(kind.returned and kind is not self._present for kind in self._known)

    def repeated_often(self, periods: int) -> None:
        """Count so many periods that repeated the last, while no other kind had returned (`may_return`)."""
        self._period += periods
        self._came()

    def _came(self) -> bool:
        if self._present is not None:
            self._present.seen = self._period
        stale = [kind for kind in self._known if self._period - kind.seen > REMEMBERED]
        self._known = [kind for kind in self._known if kind not in stale]
        return any(kind.returned for kind in stale)

    def learn(self, log: Log, predicted: SequenceLayout, largest: Largest | None = None) -> None:
        """Remember the prediction made from the period that has just ended, for its kind.

        One for the `largest` sizes is for all kinds that differ in sizes alone.
        """
        sizes = log.requests["bytes"].astype(np.int64)
        if largest is None:
            same = [kind for kind in (self._kind_of(sizes),) if kind]
        else:
            same = [kind for kind in self._known if len(kind.sizes) == len(sizes)]
        returned = any(kind.returned or kind is not self._known[-1] for kind in same)
        vary = None if largest is None else largest.vary.copy()
        self._present = _Kind(sizes, predicted, self._period, returned, vary)
        others = sorted((kind for kind in self._known if kind not in same), key=lambda kind: kind.seen)
        self._known = [*others[1 - MOST :], self._present]

    def layouts(self) -> list[SequenceLayout]:
        """The layouts to set: that of the kind that was learned last, and of those that have returned."""
        if not self._known:
            return []
        *others, last = (kind for kind in self._known if kind.returned or kind is self._known[-1])
        stream = last.predicted.stream
        self._laid_out = [last, *(other for other in others if other.predicted.stream == stream)]
        return [kind.predicted for kind in self._laid_out]

    def _kind_of(self, sizes: Ints) -> _Kind | None:
        return next((kind for kind in self._known if kind.has(sizes)), None)
