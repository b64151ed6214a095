"""How long steps take, by the host's clock."""

from __future__ import annotations

import statistics
from collections import deque

REMEMBERED = 10_000  # steps over which the median is taken


class StepTimes:
    """Times between the ends of optimizer steps, in seconds."""

    def __init__(self) -> None:
        self.count = 0
        self._last: float | None = None
        self._recent: deque[float] = deque(maxlen=REMEMBERED)
        self._shortest = float("inf")
        self._longest = 0.0

    def step(self, now: float) -> None:
        """A step ended at `now`."""
        self.count += 1
        if self._last is not None:
            took = now - self._last
            self._recent.append(took)
            self._shortest, self._longest = min(self._shortest, took), max(self._longest, took)
        self._last = now

    def summary(self) -> dict[str, float | None]:
        """Median, shortest and longest; None before there were two steps."""
        if not self._recent:
            return {"median": None, "min": None, "max": None}
        return {"median": statistics.median(self._recent), "min": self._shortest, "max": self._longest}
