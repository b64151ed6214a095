"""Times the host in an iteration: all of it, and the part that torch-tiers itself takes.

A clock is read around each of our functions that PyTorch calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from torch_tiers.migrator.model.timing import HookTime, HostTime

Answer = TypeVar("Answer")


class HostTimer:
    """The host's time in this process, from an iteration's first forward to its end.

    Time between two iterations is not counted: there a program waits for its data, and for the device.

    Attributes
    ----------
    ours : float
        Seconds of our own work so far, of the iteration that has begun.
    """

    def __init__(self) -> None:
        self.ours = 0.0  # seconds
        self._before = HookTime(0.0, 0.0, 0.0, 0.0), 0.0  # what hooks had taken and waited as it began
        self._began: float | None = None
        self._idle = False

    def timed(self, call: Callable[..., Answer], *args: Any) -> Answer:
        """Call a function of ours and count its time, from the begin of the iteration on if that begins within it."""
        began = time.perf_counter()
        try:
            return call(*args)
        finally:
            self.ours += time.perf_counter() - max(began, self._began or began)

    def iteration_begins(self, hooks: HookTime, blocked: float, *, idle: bool) -> None:
        """Take note that an iteration's first forward begins; calls for later forwards do nothing.

        Parameters
        ----------
        hooks : HookTime
            The hooks' time so far.
        blocked : float
            Seconds that the host waited in them so far, such as for a drive.
        idle : bool
            Whether the device is idle.
        """
        if self._began is None:
            self.ours, self._before, self._idle = 0.0, (hooks, blocked), idle
            self._began = time.perf_counter()

    def iteration_over(self, hooks: HookTime, blocked: float) -> HostTime | None:
        """Return the time of the iteration without those waits; None if it did not begin."""
        began, self._began = self._began, None
        if began is None:
            return None
        before, waited = self._before[0], blocked - self._before[1]
        taken = HookTime(*(now - then for now, then in zip(hooks, before, strict=True)))
        # It is groups that are waited for, some by the tensor that asks for its own.
        rest = max(0.0, waited - taken.groups)
        taken = taken._replace(groups=max(0.0, taken.groups - waited), moves=max(0.0, taken.moves - rest))
        return HostTime(time.perf_counter() - began - waited, self.ours + sum(taken), idle=self._idle, hooks=taken)
