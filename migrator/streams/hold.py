"""Holds a device back while an iteration is recorded, so that the host gets ahead of it, and it shows its own pace."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from torch_tiers.migrator.streams import Gap, TimedEvent

LONGEST = 5e-3  # seconds at once: in so many a host issues fewer kernels than a stream's queue holds
SHORTEST = 2.5e-4


class Device(Protocol):
    """What is asked of a program on a GPU; see `migrator.streams.cuda.CudaCompute`."""

    def hold_up(self, seconds: float) -> None: ...


class Hold:
    """Holds back the device of one iteration, again whenever it comes near to the host.

    A program that waits for its device after every few operators waits for the rest of each hold, too. So a hold is
    twice as long as the host made use of the one before.

    Parameters
    ----------
    mark : callable
        Marks a point of the present stream.
    clock : callable
        The host's clock, in seconds.
    """

    def __init__(
        self, device: Device, mark: Callable[[], TimedEvent], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._device = device
        self._mark = mark
        self._clock = clock
        self._seconds = LONGEST
        self._over: TimedEvent | None = None  # where the last one ends, until the device is seen to be there
        self._began = self._until = self._used = 0.0  # by the host's clock; until then it lasts at least
        self._looked = clock()

    def begin(self) -> Gap:
        """Hold the device back; return the events at which that begins and ends on the stream."""
        start = self._mark()
        self._device.hold_up(self._seconds)
        self._over = self._mark()
        self._began, self._used = self._clock(), 0.0
        self._until = max(self._began, self._until) + self._seconds
        return start, self._over

    def is_due(self, near: TimedEvent) -> bool:
        """Return whether to hold the device back now: it has passed `near`, and would be free before the next position.

        To be asked at every position: how long it is held depends on that.
        """
        now, before = self._clock(), self._looked
        self._looked = now
        if self._over is not None:
            elapsed = now - self._began
            if not self._over.query():
                self._used = elapsed
                if now + (now - before) < self._until:
                    return False
            # A host that comes much later than that was slow by itself: who waits comes as the hold is over.
            used = elapsed if elapsed > 2 * self._seconds else self._used
            self._over, self._seconds = None, min(LONGEST, max(SHORTEST, 2 * used))
        return near.query()
