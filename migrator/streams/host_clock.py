"""The program's own host time between two positions, and the stretches in which it waits for the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch_tiers.migrator.streams import TimedEvent

BEHIND, IDLE = 5e-4, 1e-4  # seconds by which a device is behind for certain, and by which it is not


class HostClock:
    """When the host was with the program in each stretch, and whether it waited for the device there.

    Parameters
    ----------
    begin : event
        Of the device's, at which the iteration begins.
    delayed : callable
        Seconds that requests for memory have waited for pages so far, in all threads. An iteration that is recorded
        maps thousands, of 80 us each. Under a plan whose layout is followed none is mapped; where sizes change all the
        time, some are in every iteration, which this leaves out, too.
    """

    def __init__(self, begin: TimedEvent, delayed: Callable[[], float] = lambda: 0.0) -> None:
        self._delayed = delayed
        self._delayed_before = delayed()
        self._since: float | None = time.perf_counter()  # when the program went on; None while it is we who work
        self._own = self._delay = 0.0  # seconds of this stretch
        self._behind = begin  # what the device had yet to pass as the stretch began
        self._began, self._ended = self._since, self._since
        self._stretches: list[_Stretch] = []

    def arrive(self) -> None:
        """The host came from the program to us."""
        if self._since is not None:
            self._ended = time.perf_counter()
            spent = self._ended - self._since
            delay = min(spent, self._delayed() - self._delayed_before)  # of all threads, some of which go on meanwhile
            self._own += spent - delay
            self._delay += delay
            self._since = None

    def depart(self) -> None:
        """The host goes on with the program."""
        self._delayed_before = self._delayed()
        self._since = time.perf_counter()
        if not self._own and not self._delay:
            self._began = self._since

    def stretch_over(self, behind: TimedEvent) -> None:
        """The next one begins, at the event after which the device has what is issued in it."""
        self._stretches.append(_Stretch(self._own, self._delay, self._began, self._ended, self._behind))
        self._own, self._delay, self._behind = 0.0, 0.0, behind

    def busy(self, device: Sequence[float], when: Callable[[TimedEvent], float]) -> tuple[float, ...]:
        """Return the device's seconds in each stretch without those in which it waited for memory to be mapped.

        While the host maps pages, the device finishes what it had when the stretch began; then it waits. What the host
        had issued in that stretch before the pages is left out as well: that is little.

        Parameters
        ----------
        device, when
            See `clocks`.
        """
        return tuple(
            max(0.0, busy - max(0.0, stretch.delay - max(0.0, when(stretch.behind) - stretch.began)))
            for stretch, busy in zip(self._stretches, device, strict=True)
        )

    def clocks(
        self, device: Sequence[float], when: Callable[[TimedEvent], float], ticks: Sequence[TimedEvent]
    ) -> tuple[tuple[float, ...], frozenset[int]]:
        """The host's own seconds in each stretch, and the stretches in which it waited for the device.

        It did where the device was behind as the stretch began, and had nothing to do any more as it ended. Of what the
        host did meanwhile only that counts which the device did not hide.

        Parameters
        ----------
        device : sequence of float
            Seconds of the device's in each stretch.
        when : callable
            When the device passed an event, on the host's clock.
        ticks : sequence of event
            The end of each stretch.
        """
        own, joins = [], set()
        for number, (stretch, busy, tick) in enumerate(zip(self._stretches, device, ticks, strict=True)):
            behind = when(stretch.behind) - stretch.began - stretch.delay
            waited = behind > BEHIND and when(tick) - stretch.ended < IDLE
            own.append(max(0.0, stretch.own - behind - busy) if waited else stretch.own)
            if waited:
                joins.add(number)
        return tuple(own), frozenset(joins)


class _Stretch(NamedTuple):
    """What the host did from one position to the next: for how many seconds, from when to when, behind which event."""

    own: float
    delay: float  # seconds besides, for memory
    began: float
    ended: float
    behind: TimedEvent
