"""What a period takes the host, and how much of that is ours: a clock is read around all that PyTorch calls of us."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, TypeVar

from torch_tiers.migrator.timing import HostLap

Answer = TypeVar("Answer")


class HostTime:
    """The host's time in this process, from a period's first forward to its end.

    What is between two periods is not counted: there a program waits for its data, and for the device.
    """

    def __init__(self) -> None:
        self._ours = 0.0  # seconds
        self._before = (0.0, 0.0)  # what hooks had taken, and waited, as the period began
        self._began: float | None = None
        self._idle = False

    def timed(self, call: Callable[..., Answer], *args: Any) -> Answer:
        """Call something of ours, and count for how long; what it does before a period begins in it is of no period."""
        began = time.perf_counter()
        try:
            return call(*args)
        finally:
            self._ours += time.perf_counter() - max(began, self._began or began)

    def period_begins(self, hooks: float, blocked: float, *, idle: bool) -> None:
        """A period's first forward begins; later ones are told of as well.

        Parameters
        ----------
        hooks : float
            Seconds that hooks for saved tensors have taken so far; NaN where nobody counts them.
        blocked : float
            Seconds for which the host waited in them so far, such as for a drive.
        idle : bool
            Whether the device has nothing to do.
        """
        if self._began is None:
            self._ours, self._before, self._idle = 0.0, (hooks, blocked), idle
            self._began = time.perf_counter()

    def period_over(self, hooks: float, blocked: float) -> HostLap | None:
        """A period is over; what it took without those waits, or None where that is not known."""
        began, self._began = self._began, None
        waited = blocked - self._before[1]
        ours = self._ours + hooks - self._before[0] - waited
        if began is None or math.isnan(ours):
            return None
        return HostLap(time.perf_counter() - began - waited, max(0.0, ours), idle=self._idle)
