"""The kinds of periods that a program goes through, and the layouts of those that come back. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from torch_tiers.allocator.layout.packing import Ints
from torch_tiers.allocator.layout.sequence import TOLERATED, TOLERATED_SHARE, Log
from torch_tiers.allocator.native.sequence_layout import SequenceLayout

MOST = 8  # kinds to remember: the layout is made for all of them that come back
REMEMBERED = 64  # periods without a kind until it is forgotten, and what it alone had memory for


@dataclass(eq=False)
class _Kind:
    sizes: Ints
    foreseen: SequenceLayout
    seen: int  # the period in which it came last
    returned: bool = False


class Kinds:
    """What a program's periods are like, where they are not all alike: lengths that change, an evaluation now and then.

    A kind has returned when it came again after others had come between. Those that have are laid out together with the
    last; one that came and went, as the first steps of a program do, takes no memory from what is laid out.
    """

    def __init__(self) -> None:
        self._period = 0
        self._known: list[_Kind] = []
        self._laid_out: list[_Kind] = []
        self._present: _Kind | None = None  # of the last period

    def period_over(self, log: Log) -> bool:
        """Take note of a period; whether a kind that was laid out is forgotten, so that its memory can go back."""
        self._period += 1
        self._present = self._kind_of(log)
        return self._came()

    def forget(self) -> None:
        """None of those that were known comes again: else their memory would be the least that all layouts take."""
        self._known.clear()
        self._laid_out.clear()
        self._present = None

    def is_whole(self, number: int, requests: int) -> bool:
        """Whether so many requests are all of the layout of that `number`: another may begin with the same."""
        return number < len(self._laid_out) and len(self._laid_out[number].foreseen.sizes) == requests

    def came_as_laid_out(self, number: int) -> bool:
        """Take note of a period that was that layout's, whole; see `period_over`."""
        self._period += 1
        self._present = self._laid_out[number]
        return self._came()

    def came_as_before(self) -> bool:
        """Take note of a period that was like the last; see `period_over`."""
        self._period += 1
        return self._came()

    @property
    def may_return(self) -> bool:
        """Whether a kind that has returned is not the last period's: its memory may have to go back one day."""
        return any(kind.returned and kind is not self._present for kind in self._known)

    def repeated_often(self, periods: int) -> None:
        """Take note of so many periods that were like the last, while no other could return (`may_return`)."""
        self._period += periods
        self._came()

    def _came(self) -> bool:
        if self._present is not None:
            self._present.seen = self._period
        stale = [kind for kind in self._known if self._period - kind.seen > REMEMBERED]
        self._known = [kind for kind in self._known if kind not in stale]
        return any(kind.returned for kind in stale)

    def learn(self, log: Log, foreseen: SequenceLayout) -> None:
        """Remember what the period that has just ended foretells of its kind."""
        kind = self._kind_of(log)
        if kind is None:
            kind = _Kind(log.requests["bytes"].astype(np.int64), foreseen, self._period)
        else:
            kind.foreseen = foreseen
            kind.returned |= kind is not self._known[-1]
        self._present = kind
        others = sorted((other for other in self._known if other is not kind), key=lambda other: other.seen)
        self._known = [*others[1 - MOST :], kind]

    def layouts(self) -> list[SequenceLayout]:
        """What the periods to come may be: the kind that was learned last, and those that have returned."""
        if not self._known:
            return []
        *others, last = (kind for kind in self._known if kind.returned or kind is self._known[-1])
        stream = last.foreseen.stream
        self._laid_out = [last, *(other for other in others if other.foreseen.stream == stream)]
        return [kind.foreseen for kind in self._laid_out]

    def _kind_of(self, log: Log) -> _Kind | None:
        sizes = log.requests["bytes"]
        for kind in self._known:
            if len(sizes) == len(kind.sizes):
                different = np.count_nonzero(sizes != kind.sizes)
                if different <= min(max(TOLERATED, TOLERATED_SHARE * len(sizes)), len(sizes) // 8):
                    return kind
        return None
