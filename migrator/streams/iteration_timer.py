"""Times iterations on a GPU, and the waits of its compute stream in them, by events of that stream."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from torch_tiers.migrator.model.timing import CALL, IterationTime
from torch_tiers.migrator.streams import Gap, TimedEvent
from torch_tiers.migrator.streams.clock import DeviceClock
from torch_tiers.migrator.telemetry.counters import Counters

MOST_WAITS = 1 << 14  # that are timed between two ends of iterations: where a program only infers, none comes


class _Iteration(NamedTuple):
    """One that is over for the host."""

    begin: TimedEvent | None  # where the iteration before it ended
    end: TimedEvent
    waits: list[tuple[str, Gap]]  # by cause
    stands_for: int  # iterations, with its waits
    number: int  # of all that the runtime has counted
    settled: int  # and of this device's
    recorded: float  # by the host's clock: not before then its end was put into the stream

    def passed(self) -> bool:
        """Whether the device is through with it."""
        return self.end.query() and all(on.query() for _, (_, on) in self.waits)


class IterationTimer:
    """Times the iterations of one device, each from the end of the one before. Thread-safe.

    Parameters
    ----------
    device : str
        What the timeline calls it.
    counters : Counters
        Told of waits, as is the timeline that it may have.

    Attributes
    ----------
    stand_for : int
        Iterations that the waits of the one under way stand for; 0 if they are not timed.
    """

    def __init__(self, device: str, counters: Counters) -> None:
        self.stand_for = 1
        self._device = device
        self._counters = counters
        self._clock = DeviceClock()
        self._waits: list[tuple[str, Gap]] = []  # of the iteration under way
        self._ended: TimedEvent | None = None  # where the iteration before it ended
        self._over: deque[_Iteration] = deque()  # for the host
        self._settled = 0  # iterations
        self._settling = threading.Lock()

    def waited(self, cause: str, gap: Gap) -> None:
        """The stream was told to wait."""
        if len(self._waits) < MOST_WAITS:
            self._waits.append((cause, gap))

    @property
    def has_waits(self) -> bool:
        """Whether there were any in the iteration under way."""
        return bool(self._waits)

    def when(self, event: TimedEvent, recorded: float) -> float:
        """See `migrator.streams.Compute.when`."""
        return self._clock.place(event, recorded)

    def idle(self) -> bool:
        """Whether the device is through with all iterations that are over for the host."""
        return self._ended is not None and self._ended.query()

    def iteration_passed(self) -> None:
        """An iteration is over in which nobody may ask for events."""
        with self._settling:
            self._settled += 1

    def iteration_over(self, mark: Callable[[], TimedEvent]) -> IterationTime | None:
        """An iteration is over, whose end `mark` records in the stream.

        Returns
        -------
        IterationTime or None
            Of the last iteration that the device has finished; None if that was not timed.
        """
        with self._settling:  # a query lets other threads go on, and each ends iterations of its own
            self._settled += 1
            recorded = time.perf_counter()
            begin, self._ended = self._ended, mark()
            waits, self._waits = self._waits, []
            numbers = self._counters.iterations, self._settled
            self._over.append(_Iteration(begin, self._ended, waits, self.stand_for, *numbers, recorded))
            time_of_last = None
            while self._over and self._over[0].passed():
                time_of_last = self._time(self._over.popleft()) or time_of_last
        return time_of_last

    def close(self, *, capturing: bool) -> None:
        """Add up the waits of iterations that are over by now."""
        with self._settling:
            while self._over and not capturing and self._over[0].passed():
                self._time(self._over.popleft())

    def _time(self, iteration: _Iteration) -> IterationTime | None:
        begin, end, timeline, at = iteration.begin, iteration.end, self._counters.timeline, 0.0
        if timeline is not None:
            at = self.when(end, iteration.recorded)
            timeline.iteration(self._device, iteration.number, at)
        if not iteration.stands_for:
            return None
        stalls: dict[str, float] = {}
        for cause, (reached, on) in iteration.waits:
            if (seconds := reached.elapsed_time(on) / 1e3) > CALL:  # else it did not wait
                self._counters.stalled(cause, seconds, iteration.stands_for, iteration.number)
                stalls[cause] = stalls.get(cause, 0.0) + seconds
                if timeline is not None:
                    over = at - on.elapsed_time(end) / 1e3
                    timeline.waited(self._device, cause, over - seconds, over)
        # Of iterations that stand for others nobody can say whether the next is of their kind.
        if begin is None or iteration.stands_for > 1:
            return None
        return IterationTime(begin.elapsed_time(end) / 1e3, stalls, age=self._settled - iteration.settled)
