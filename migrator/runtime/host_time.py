"""What a period takes the host, and how much of that is ours: a clock is read around all that PyTorch calls of us."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, TypeVar

from torch_tiers.migrator.timing import HostLap

Answer = TypeVar("Answer")


class HostTime:
    """The host's time in this process, from the end of one period to the end of the next."""

    def __init__(self) -> None:
        self._ours = 0.0  # seconds
        self._before = 0.0  # what hooks had taken by the end of the last period
        self._ended: float | None = None

    def timed(self, call: Callable[..., Answer], *args: Any) -> Answer:
        """Call something of ours, and count for how long."""
        began = time.perf_counter()
        try:
            return call(*args)
        finally:
            self._ours += time.perf_counter() - began

    def period_over(self, hooks: float) -> HostLap | None:
        """A period is over; what it took, or None where that is not known.

        Parameters
        ----------
        hooks : float
            Seconds that hooks for saved tensors have taken so far; NaN where nobody counts them.
        """
        now, ended = time.perf_counter(), self._ended
        ours, self._ours = self._ours + hooks - self._before, 0.0
        self._before, self._ended = hooks, now
        if ended is None or math.isnan(ours):
            return None
        return HostLap(now - ended, ours)
