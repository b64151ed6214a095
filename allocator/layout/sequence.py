"""The sequence of a period's requests, and what it foretells of the next period. Pure functions.

The requests of a training step repeat, size by size, and so do their deaths. So the log of one period
is the layout of those that follow (Sentinel, HPCA'21, groups by lifetime what it has seen in
profiled steps; here every block has the place that its lifetime leaves free).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from torch_tiers.allocator.layout.packing import Ints, Layout, pack
from torch_tiers.allocator.native.binding import STATE
from torch_tiers.allocator.native.sequence_layout import ELSEWHERE, SequenceLayout
from torch_tiers.allocator.sizes import PAGE

TOLERATED = 4  # requests that may come otherwise than foreseen in a period that repeats the one before
TOLERATED_SHARE = 0.002  # of the requests, in a period that does not
EAGER = 8  # looks in a row that are not put off: programs take some steps to settle
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

    def most_alive(self) -> int:
        """The most bytes of what was asked for that were in use at once, which no layout can be smaller than."""
        births, deaths, sizes = (self.requests[field].astype(np.int64) for field in ("birth", "death", "bytes"))
        change = np.zeros(self.events + 1, np.int64)
        np.add.at(change, births, sizes)
        died = (deaths >= 0) & (deaths < self.events)
        np.add.at(change, deaths[died], -sizes[died])
        return int(np.cumsum(change).max())

    def until(self, count: int) -> Log:
        """The same as if nothing had come after the first `count` requests that was over before the period was.

        What is alive at its end is the next one's, such as a batch.
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


def foresee(last: Log, before: Log | None = None, room: int = 0) -> SequenceLayout | None:
    """Expect the last period to come again, on the stream that asks for the most.

    What was alive at its end dies in the next period, if the one before the last had the same sequence and
    there it did. Otherwise it is expected again and has no place: where it stayed it would be in the way.
    What is known to live as long as the program does not come again. For `room`, in bytes, see `pack`.

    Returns
    -------
    SequenceLayout or None
        None if nothing that was asked for died.
    """
    requests = last.requests
    if not len(requests):
        return None
    streams, number = np.unique(requests["stream"], return_inverse=True)
    main = int(np.argmax(np.bincount(number, weights=requests["bytes"].astype(np.float64))))
    births, deaths = requests["birth"].astype(np.int64), requests["death"].astype(np.int64)
    if before is not None and repeats(last, before):
        wraps = (deaths < 0) & (before.requests["death"] >= before.events)
        deaths[wraps] = before.requests["death"][wraps] - before.events + last.events
    comes = (number == main) & ((deaths >= 0) | (requests["class"] != STATE))
    births, deaths, sizes = births[comes], deaths[comes], requests["bytes"][comes].astype(np.int64)
    placed = (deaths >= 0) & (deaths - births <= last.events)
    if not placed.any():
        return None
    layout = pack(sizes[placed], births[placed], deaths[placed], last.events, room)
    offsets = np.full(len(sizes), ELSEWHERE, np.uint64)
    offsets[placed] = layout.offsets
    return SequenceLayout(int(streams[main]), sizes, offsets, _visits(layout, sizes[placed]))


def _visits(layout: Layout, sizes: Ints) -> Ints:
    change = np.zeros(layout.total // PAGE + 2, np.int64)
    np.add.at(change, layout.offsets // PAGE, 1)
    np.add.at(change, (layout.offsets + sizes - 1) // PAGE + 1, -1)
    return np.cumsum(change)[: -(-layout.total // PAGE)]


def repeats(last: Log, before: Log) -> bool:
    """Whether two periods had the same requests, which died at the same events."""
    return last.events == before.events and all(
        np.array_equal(last.requests[field], before.requests[field]) for field in ("bytes", "stream", "birth")
    )


class Watch:
    """Decides after each period whether its log is worth a new layout."""

    def __init__(self) -> None:
        self._period = 0
        self._looks = 0  # one after the other without a period as foreseen
        self._until = 0
        self._lacking = False  # whether there is no layout, though one is wanted

    def refused(self) -> None:
        """The layout that was worth it could not be made: look again, as rarely as at what never repeats."""
        self._lacking = True

    def expect_news(self) -> None:
        """The program is about to change, and to settle again: there is no layout to depart from.

        What never came as foreseen is not looked at more often for that: each look packs what comes no more.
        """
        self._lacking = True

    def nothing_departed(self) -> bool:
        """Take note of a period from whose layout nothing departed; False while there is none to depart from."""
        if not self._looks or self._lacking:
            return False
        self._period += 1
        self._held()
        return True

    def _held(self) -> None:
        self._looks, self._until = 1, 0

    def repeated(self, departed: int) -> bool:
        """Take note of a period that was the same as the one before; False if it is to be looked at all the same."""
        return departed <= TOLERATED and self.nothing_departed()

    def repeated_often(self, periods: int) -> None:
        """Take note of so many periods that were as the last, which was not to be looked at."""
        self._period += periods

    def period_over(self, requests: int, departed: int, *, repeated: bool) -> bool:
        """Take note of a period in which `departed` of `requests` came otherwise than foreseen; whether to look anew.

        A sequence that has repeated is looked at if anything departed from what was foreseen: the program has
        settled, and the layout was made before. One that is new in every period (shapes, routing) is looked at
        ever more rarely.

        Parameters
        ----------
        repeated : bool
            Whether the period was the same as the one before.
        """
        self._period += 1
        if self._looks and not self._lacking and departed <= (TOLERATED if repeated else TOLERATED_SHARE * requests):
            self._held()
            return False
        # One that repeats, and has no layout, is none of those that never do.
        if not requests or (self._period < self._until and not (repeated and self._lacking)):
            return False
        self._looks += 1
        self._lacking = False
        self._until = self._period + min(LONGEST_PAUSE, 1 << max(0, self._looks - EAGER))
        return True
