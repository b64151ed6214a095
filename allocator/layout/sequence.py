"""Predicts the requests of the next period from the log of the last, and decides when to do so anew. Pure.

The requests of a training step repeat, size by size, and so do the events at which they are freed. So the log of one
period gives the layout of those that follow: each block gets a place that is free throughout its lifetime. (Sentinel,
HPCA'21, groups blocks by lifetime that it has seen in profiled steps.)
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import numpy as np
import numpy.typing as npt

from torch_tiers.allocator.layout.packing import Ints, Layout, pack
from torch_tiers.allocator.native.binding import STATE
from torch_tiers.allocator.native.sequence_layout import ELSEWHERE, SequenceLayout
from torch_tiers.allocator.sizes import PAGE

TOLERATED = 4  # unpredicted requests without a new layout, in a period that repeats the one before
TOLERATED_SHARE = 0.002  # the same as a share of the requests, in a period that does not
MISLED = 0.5  # with a larger share of them unpredicted, a layout does harm
TRUSTED = 2  # layouts in a row that were misled, after which only a period that comes again is laid out
ALIKE = 0.9  # of the requests: a period that has them as another had them comes again
REMEMBERED = 8  # periods that one may repeat
OUTLIER = 2  # times as large as any period before it
EAGER = 8  # looks in a row without a pause: programs take some steps until they repeat
HUGE = 1 << 40  # bytes: no request is larger, so that what each byte of it costs in DRAM is a whole number
LONGEST_PAUSE = 128  # periods between two looks at a sequence that never repeats


@dataclass(frozen=True)
class Log:
    """The requests of one period.

    Attributes
    ----------
    requests : structured array
        With the fields ``bytes``, ``stream``, ``birth``, ``death`` and ``class``; a death at or past `events` lies in
        the period after it, and -1 says that there was none so far.
    events : int
        Requests and frees of the period.
    """

    requests: npt.NDArray[Any]
    events: int

    def main_stream(self) -> int:
        """The stream that requests the most, which is the one to be laid out."""
        streams, number = np.unique(self.requests["stream"], return_inverse=True)
        return int(streams[np.argmax(np.bincount(number, weights=self.requests["bytes"].astype(np.float64)))])

    def most_alive(self, stream: int | None = None) -> int:
        """The most bytes of these requests, or those on one stream, that were alive at once; no layout is smaller."""
        requests = self.requests if stream is None else self.requests[self.requests["stream"] == stream]
        births, deaths, sizes = (requests[field].astype(np.int64) for field in ("birth", "death", "bytes"))
        change = np.zeros(self.events + 1, np.int64)
        np.add.at(change, births, sizes)
        died = (deaths >= 0) & (deaths < self.events)
        np.add.at(change, deaths[died], -sizes[died])
        return int(np.cumsum(change).max())

    def until(self, count: int) -> Log:
        """The log without the requests after the first `count` that were freed before the period ended.

        Requests after those that were alive at its end stay: they are the next period's, such as a batch.
        """
        births, deaths = (self.requests[field].astype(np.int64) for field in ("birth", "death"))
        over = (np.arange(len(births)) >= count) & (deaths >= 0) & (deaths < self.events)
        gone = np.zeros(self.events + 1, np.int64)  # by event, how many of those before it had not been
        np.add.at(gone, births[over] + 1, 1)
        np.add.at(gone, deaths[over] + 1, 1)
        gone = np.cumsum(gone)
        requests = self.requests[~over].copy()
        requests["birth"] = births[~over] - gone[births[~over]]
        died = deaths[~over]
        requests["death"] = np.where(died < 0, died, died - gone[np.minimum(died, self.events)])
        return Log(requests, self.events - int(gone[-1]))


def predict(
    last: Log, before: Log | None = None, room: int = 0, largest: Largest | None = None
) -> SequenceLayout | None:
    """Predict that the last period comes again, and lay it out, on the stream that requests the most.

    Blocks that were alive at the end of `last` die in the next period if they did so in the period after `before`,
    which had the same sequence. Otherwise they are predicted again, but get no place: if they stay alive, they would be
    in the way there. State is not predicted again: it lives as long as the program. For `room`, in bytes, see `pack`.
    With `largest` each request has a place for the most bytes that it has had.

    Returns
    -------
    SequenceLayout or None
        None if no block was freed.
    """
    requests = last.requests
    if not len(requests):
        return None
    main = last.main_stream()
    births, deaths = requests["birth"].astype(np.int64), requests["death"].astype(np.int64)
    if before is not None and (repeats(last, before) or (largest is not None and is_like(last, before))):
        wraps = (deaths < 0) & (before.requests["death"] >= before.events)
        deaths[wraps] = before.requests["death"][wraps] - before.events + last.events
    comes = (requests["stream"] == main) & ((deaths >= 0) | (requests["class"] != STATE))
    births, deaths = births[comes], deaths[comes]
    sizes = (requests["bytes"].astype(np.int64) if largest is None else largest.sizes)[comes]
    placed = (deaths >= 0) & (deaths - births <= last.events)
    if not placed.any():
        return None
    layout = pack(sizes[placed], births[placed], deaths[placed], last.events, room)
    offsets = np.full(len(sizes), ELSEWHERE, np.uint64)
    offsets[placed] = layout.offsets
    vary = None if largest is None else largest.vary[comes]
    return SequenceLayout(main, sizes, offsets, _costs(layout, sizes[placed]), vary)


def _costs(layout: Layout, sizes: Ints) -> Ints:
    """Return what each page would cost in DRAM: the more, the more requests come to lie there, and the smaller ones.

    Of the operands of a matrix product the smaller one is read more often, for each tile of the larger one. Beside
    logits of 4.4 GiB in HBM, 0.2 GiB of a decoder's last hidden states in DRAM took 500 ms.
    """
    weights = HUGE // np.clip(sizes, 1, HUGE)
    change = np.zeros(layout.total // PAGE + 2, np.int64)
    np.add.at(change, layout.offsets // PAGE, weights)
    np.add.at(change, (layout.offsets + sizes - 1) // PAGE + 1, -weights)
    return np.cumsum(change)[: -(-layout.total // PAGE)]


def repeats(last: Log, before: Log) -> bool:
    """Whether two periods had the same requests, which died at the same events."""
    return is_like(last, before) and np.array_equal(last.requests["bytes"], before.requests["bytes"])


def is_like(last: Log, before: Log) -> bool:
    """Whether two periods had as many requests, at the same events, whatever their sizes."""
    return last.events == before.events and all(
        np.array_equal(last.requests[field], before.requests[field]) for field in ("stream", "birth")
    )


class Largest:
    """The most bytes that each request has had, over periods in a row that differ in sizes alone.

    So it is where batches have other lengths, or images other sizes: one layout for the largest serves all of them.

    Attributes
    ----------
    sizes : array of int64, shape (requests,)
        The most bytes of each request.
    vary : array of bool, shape (requests,)
        Which requests had other sizes.
    most_alive : int
        The most bytes of a period that were alive at once, on the stream that requests the most.
    """

    def __init__(self) -> None:
        self._restart(np.zeros(0, np.int64))
        self._alike = 0  # periods in a row that were like the one before
        self._wanted = 1  # so many before they are laid out: twice as many each time that another came between them

    def _restart(self, sizes: Ints) -> None:
        self.sizes, self.vary, self.most_alive = sizes, np.zeros(len(sizes), np.bool_), 0

    def period_over(self, last: Log, before: Log | None, room: int) -> bool:
        """Take in a period; return whether it and enough before it were alike, but for sizes.

        One that HBM has no `room` for, in bytes, and that is twice as large as any before it, is not taken in: its
        place would take memory, and DRAM, for as long as the others come.
        """
        sizes = last.requests["bytes"].astype(np.int64)
        if before is None or not len(sizes) or not is_like(last, before):
            if self._alike >= self._wanted:
                self._wanted = min(LONGEST_PAUSE, 2 * self._wanted)
            self._alike = 0
            self._restart(sizes)
            return False
        self._alike += 1
        if len(self.sizes) != len(sizes):
            self._restart(before.requests["bytes"].astype(np.int64))
        if not self.most_alive:
            self.most_alive = before.most_alive(before.main_stream())
        most_alive = last.most_alive(last.main_stream())
        if most_alive <= max(room, OUTLIER * self.most_alive):
            self.vary |= sizes != self.sizes
            self.sizes = np.maximum(self.sizes, sizes)
            self.most_alive = max(self.most_alive, most_alive)
        return self._alike >= self._wanted and bool(self.vary.any())


class LayoutDecision(Enum):
    """What to do about the layout after a period."""

    KEEP = auto()
    RENEW = auto()  # make one from the period's log
    FORGET = auto()


class Watch:
    """Decides after each period whether to make a new layout from its log.

    To read and pack a log takes time in which the device is idle. A period that came as laid out needs no new layout.
    A program whose periods never repeat is looked at ever more rarely. Once two in a row had little of their layouts,
    only one that came before is laid out: best fit does better for all others. Where every period has other sizes, a
    layout keeps its places from those that come. A mixture of experts had 3 GiB in DRAM beside 9 that lay idle.
    """

    def __init__(self) -> None:
        self._period = 0
        self._looks = 0  # in a row, without a period between that came as laid out
        self._until = 0
        self._lacking = False  # whether there is no layout, and one should be made
        self._misled = 0  # layouts in a row that were of little use to a period that was new
        self._recent: deque[Ints] = deque(maxlen=REMEMBERED)  # periods' sizes

    def refused(self) -> None:
        """The layout could not be set: look again, as rarely as at a program that never repeats."""
        self._lacking = True

    def expect_new_plans(self) -> None:
        """The layout is forgotten, as the program is about to change: make one once it repeats again.

        A program that never repeats is not looked at more often for that.
        """
        self._lacking = True

    def nothing_mispredicted(self) -> bool:
        """Count a period in which no request was mispredicted by the layout; False if there is no layout."""
        if not self._looks or self._lacking:
            return False
        self._period += 1
        self._came_as_laid_out()
        return True

    def _came_as_laid_out(self) -> None:
        self._looks, self._until, self._misled = 1, 0, 0

    def repeated(self, mispredicted: int) -> bool:
        """Count a period that repeated the one before; False if its log has to be looked at all the same."""
        return mispredicted <= TOLERATED and self.nothing_mispredicted()

    def repeated_often(self, periods: int) -> None:
        """Count so many periods that repeated the last, which did not have to be looked at."""
        self._period += periods

    def period_over(
        self, sizes: Ints, mispredicted: int, *, repeated: bool, differs_in_sizes: bool = False
    ) -> LayoutDecision:
        """Count a period in which `mispredicted` requests were not as predicted; return what to do about the layout.

        If the period repeated the one before, a few departures are enough: the program repeats by now, and the layout
        is older. If every period is new (shapes, routing), the pauses between new layouts grow.

        Parameters
        ----------
        sizes : array of int
            The bytes of each request.
        repeated : bool
            Whether the period was the same as the one before.
        differs_in_sizes : bool
            Whether it was but for sizes, and a layout for the largest of them may serve it.
        """
        self._period += 1
        came_before = differs_in_sizes or any(
            len(sizes) == len(others) and np.count_nonzero(sizes == others) >= ALIKE * len(sizes)
            for others in self._recent
        )
        self._recent.append(sizes)
        has_layout = self._looks > 0 and not self._lacking
        if has_layout and mispredicted <= (TOLERATED if repeated else TOLERATED_SHARE * len(sizes)):
            self._came_as_laid_out()
            return LayoutDecision.KEEP
        misled = has_layout and mispredicted > MISLED * len(sizes)
        self._misled = 0 if came_before else self._misled + misled
        # One that repeats, and has no layout, is none of those that never do.
        is_due = self._period >= self._until or (repeated and self._lacking)
        if len(sizes) and is_due and self._misled < TRUSTED:
            self._looks += 1
            self._lacking = False
            self._until = self._period + min(LONGEST_PAUSE, 1 << max(0, self._looks - EAGER))
            return LayoutDecision.RENEW
        if misled and not came_before:
            self._lacking = True
            return LayoutDecision.FORGET
        return LayoutDecision.KEEP  # also where another of several kinds comes, which is laid out when it is its turn
