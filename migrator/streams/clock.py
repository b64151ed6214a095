"""Converts times of a device's events to the host's clock."""

from __future__ import annotations

import time
from collections.abc import Callable

from torch_tiers.migrator.streams import TimedEvent


class DeviceClock:
    """Places events of a device on the host's clock, without a question to the device that takes it time.

    From one event to the next the device's own clock counts. What ties the two together is what the host is sure of:
    no event is passed before it is put into its stream, nor after it was seen to be passed. An event for which the
    device was idle sets the clock right to within the time of a call; while iterations are recorded the host waits for
    the device at their ends, so that happens early on. Clocks that drift apart later are held together by the same two
    facts, which then bound what is off by the time that the device lies behind the host, or the host does not look.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._last: tuple[TimedEvent, float] | None = None

    def place(self, event: TimedEvent, recorded: float) -> float:
        """When an event was passed, which it has been by now, in seconds of the host's clock.

        Parameters
        ----------
        recorded : float
            When it was about to be put into its stream.
        """
        at, last = recorded, self._last  # which another thread may replace
        if last is not None:
            before, when = last
            at = max(at, when + before.elapsed_time(event) / 1e3)
        at = min(at, self._now())
        self._last = event, at
        return at
