"""Books bandwidth and HBM: what each lane does when, and what HBM holds in every stretch.

Pure: no torch, no clock.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from torch_tiers.migrator.model.links import LANES, OPPOSITE, Links
from torch_tiers.migrator.model.trace import Trace
from torch_tiers.migrator.planner.intervals import Bytes, Floats, occupancy, room


class Lane:
    """One direction of one link as a line of time: what is booked never overlaps."""

    def __init__(self) -> None:
        self._starts: list[float] = []
        self._ends: list[float] = []

    def earliest(self, after: float, seconds: float) -> float:
        """The earliest start, not before `after`, of `seconds` that are free."""
        at = bisect_right(self._ends, after)
        start = after
        while at < len(self._starts) and self._starts[at] < start + seconds:
            start = self._ends[at]
            at += 1
        return start

    def latest(self, before: float, seconds: float) -> float:
        """The latest start of `seconds` that are free and over by `before`; negative if the iteration has none."""
        at = bisect_left(self._starts, before) - 1
        end = before
        while at >= 0 and self._ends[at] > end - seconds:
            end = self._starts[at]
            at -= 1
        return end - seconds

    def book(self, start: float, end: float) -> None:
        """Take ``[start, end)``, which must be free."""
        at = bisect_right(self._ends, start)
        # Neighbours that touch become one, so that a busy lane is a short list.
        if at and self._ends[at - 1] == start:
            at -= 1
            start = self._starts[at]
            del self._starts[at], self._ends[at]
        if at < len(self._starts) and self._starts[at] == end:
            end = self._ends[at]
            del self._starts[at], self._ends[at]
        self._starts.insert(at, start)
        self._ends.insert(at, end)

    def busy(self, start: float, end: float) -> float:
        """Seconds that are booked between `start` and `end`."""
        total, at = 0.0, bisect_right(self._ends, start)
        while at < len(self._starts) and self._starts[at] < end:
            total += min(self._ends[at], end) - max(self._starts[at], start)
            at += 1
        return total

    @property
    def booked(self) -> tuple[tuple[float, float], ...]:
        """All that is booked, in order."""
        return tuple(zip(self._starts, self._ends, strict=True))


@dataclass(frozen=True, slots=True)
class Transfer:
    """One way of a storage, over one lane or two.

    Attributes
    ----------
    legs : tuple of (str, float, float)
        Lane, start and end in seconds, in the order in which they are travelled.
    """

    legs: tuple[tuple[str, float, float], ...]

    @property
    def start(self) -> float:
        """When it begins; for a way back, when it must be asked for."""
        return self.legs[0][1]

    @property
    def left(self) -> float:
        """When HBM may be released: for a way out, the end of the first leg."""
        return self.legs[0][2]

    @property
    def end(self) -> float:
        """When it is there."""
        return self.legs[-1][2]


class Lanes:
    """The lanes between the tiers. Ask for a transfer, look at it, and book it or not.

    Parameters
    ----------
    links : Links
        How fast they are. While both directions between HBM and DRAM are busy they share ``links.both``;
        a transfer is slowed by what was booked before it, never by what comes later.
    """

    def __init__(self, links: Links) -> None:
        self.links = links
        self.lanes: Mapping[str, Lane] = {name: Lane() for name in LANES}

    def out(self, nbytes: int, after: float, tier: str = "dram") -> Transfer:
        """The way out of HBM to a tier that begins earliest, but not before `after`."""
        legs = []
        for name in self.links.ways(tier)[0]:
            legs.append(self._earliest(name, nbytes, after))
            after = legs[-1][2]
        return Transfer(tuple(legs))

    def back(self, nbytes: int, before: float, tier: str = "dram") -> Transfer:
        """The way back that begins latest and is over by `before`; its start is negative if there is none."""
        legs = []
        for name in reversed(self.links.ways(tier)[1]):
            legs.append(self._latest(name, nbytes, before))
            before = legs[-1][1]
        return Transfer(tuple(reversed(legs)))

    def book(self, transfer: Transfer) -> None:
        """Take the lanes for `transfer`."""
        for name, start, end in transfer.legs:
            self.lanes[name].book(start, end)

    def seconds(self, name: str, nbytes: int, start: float) -> float:
        """What `nbytes` take on a lane from `start` on."""
        rate: float = getattr(self.links, name)
        if rate <= 0:
            raise ValueError(f"there is no lane {name}: its rate is {rate}")
        alone = self.links.latency + nbytes / rate
        if name not in OPPOSITE:
            return alone
        # While the other direction is busy as well, a second brings `shared` of what it brings alone.
        shared = min(1.0, self.links.both / (self.links.d2h + self.links.h2d))
        seconds = alone
        for _ in range(3):  # a longer transfer meets more of the other direction
            before, seconds = seconds, alone + (1 - shared) * self.lanes[OPPOSITE[name]].busy(start, start + seconds)
            if seconds == before:
                break
        return seconds

    def _earliest(self, name: str, nbytes: int, after: float) -> tuple[str, float, float]:
        lane = self.lanes[name]
        start = after
        while True:
            seconds = self.seconds(name, nbytes, start)
            found = lane.earliest(start, seconds)
            if found == start:
                return name, start, start + seconds
            start = found

    def _latest(self, name: str, nbytes: int, before: float) -> tuple[str, float, float]:
        lane, seconds = self.lanes[name], self.seconds(name, nbytes, before)
        while True:
            start = lane.latest(before, seconds)
            needed = self.seconds(name, nbytes, start)
            if needed <= seconds:
                return name, start, start + seconds
            seconds = needed


class Memory:
    """Saved bytes in HBM in every stretch, against what the budget leaves for them.

    It begins with everything kept; decisions take bytes away and put them back.

    Parameters
    ----------
    trace : Trace
        The iteration.
    budget : int
        HBM for saved tensors and `others`, in bytes.

    Attributes
    ----------
    used : array of int
        Saved bytes in HBM, by stretch.
    room : array of int
        What the budget leaves for them, by stretch.
    excess : array of float
        The difference, to be multiplied by times: exact up to 8 PiB.
    """

    def __init__(self, trace: Trace, budget: int) -> None:
        self.used: Bytes = occupancy(trace)
        self.room: Bytes = room(trace, budget)
        self.excess: Floats = (self.used - self.room).astype(np.float64)
        self._fits: bool | None = None  # as long as it is known

    def add(self, first: int, end: int, nbytes: int) -> None:
        """Have `nbytes` more in stretches ``[first, end)``; less if negative."""
        self.used[first:end] += nbytes
        self.excess[first:end] += nbytes
        self._fits = None

    @property
    def over(self) -> Bytes:
        """Bytes above the room, by stretch; 0 where it fits."""
        return (self.used - self.room).clip(min=0)

    @property
    def fits(self) -> bool:
        """Whether every stretch is within the budget."""
        if self._fits is None:
            self._fits = bool((self.used <= self.room).all())
        return self._fits
