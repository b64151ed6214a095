"""Step times, by the host's clock."""

from __future__ import annotations

import statistics
from collections import deque
from typing import Any

REMEMBERED = 10_000  # steps over which the median is taken
LATELY = 15  # steps that tell how the program is now


class StepTimes:
    """Times between the ends of optimizer steps, in seconds."""

    def __init__(self) -> None:
        self.count = 0
        self._last: float | None = None
        self._recent: deque[float] = deque(maxlen=REMEMBERED)
        self._shortest = float("inf")
        self._longest = 0.0
        self._learning: int | None = None  # steps until the last plan was there

    def planned(self) -> None:
        """There are new plans. The step that is under way did not begin under them, and may have made them."""
        self._learning = self.count + 1

    def step(self, now: float) -> None:
        """A step ended at `now`."""
        self.count += 1
        if self._last is not None:
            took = now - self._last
            self._recent.append(took)
            self._shortest, self._longest = min(self._shortest, took), max(self._longest, took)
        self._last = now

    def lately(self) -> float | None:
        """Seconds of a step, in the median of the last few; None before there were two steps."""
        times = self._recent
        few = [times[-back] for back in range(1, min(LATELY, len(times)) + 1)]
        return statistics.median(few) if few else None

    def summary(self) -> dict[str, Any]:
        """Median, shortest and longest; None before there were two steps. `settled` is of those under the last plan.

        Nine of ten of these lie between `low` and `high`, as many above as below.
        """
        times = list(self._recent)
        count = 0 if self._learning is None else min(max(self.count - self._learning, 0), len(times))
        settled = sorted(times[len(times) - count :])
        outside = count // 20  # on either side
        return {
            "median": statistics.median(times) if times else None,
            "min": self._shortest if times else None,
            "max": self._longest if times else None,
            "settled": {
                "median": statistics.median(settled) if settled else None,
                "low": settled[outside] if settled else None,
                "high": settled[-1 - outside] if settled else None,
                "steps": count,
            },
        }
