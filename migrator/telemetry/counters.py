"""What the runtime counts: bytes per lane, stalls by cause, groups. Plain numbers, read by `stats`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch_tiers.migrator.model.links import LANES
from torch_tiers.migrator.telemetry.timeline import Timeline
from torch_tiers.migrator.telemetry.trace_events import HOST


@dataclass(slots=True)
class Stall:
    """How often, and for how long in seconds, somebody waited for one cause."""

    count: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class Counters:
    """Totals over the life of a session, of all its devices; and when what they count happened, if anybody asks."""

    moved: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LANES, 0))
    stalls: dict[str, Stall] = field(default_factory=dict)
    groups: int = 0
    iterations: int = 0
    steps: int = 0
    step_s: float | None = None  # of the last few steps, in seconds
    flushes: int = 0  # of the cache of PyTorch's allocator, as HBM was full
    timeline: Timeline | None = None
    blocked: float = 0.0  # seconds for which the host waited so far
    _learning: tuple[int, int, dict[str, int]] = (0, 0, {})  # before the last plan: iterations, flushes, bytes by lane
    _stalled: dict[str, float] = field(default_factory=dict)  # since then, in seconds by cause

    def stalled(self, cause: str, seconds: float, times: int = 1, iteration: int | None = None) -> None:
        """Add a wait of `seconds`, which stands for so many like it.

        Of a device it is known once that is through with the `iteration`, when there may be other plans than in it.
        """
        stall = self.stalls.setdefault(cause, Stall())
        stall.count += times
        stall.seconds += times * seconds
        if iteration is None or iteration > self._learning[0]:
            self._stalled[cause] = self._stalled.get(cause, 0.0) + times * seconds

    def planned(self) -> None:
        """There are new plans."""
        self._learning, self._stalled = (self.iterations, self.flushes, dict(self.moved)), {}

    def settled(self) -> dict[str, Any]:
        """What was counted under the last plans; what comes before is learning, which moves more."""
        iterations, flushes, moved = self._learning
        return {
            "iterations": self.iterations - iterations,
            "flushes": self.flushes - flushes,
            "moved": {lane: nbytes - moved.get(lane, 0) for lane, nbytes in self.moved.items()},
            "stalled_s": {cause: self._stalled.get(cause, 0.0) for cause in self.stalls},
        }

    @contextmanager
    def waiting(self, cause: str) -> Iterator[None]:
        """Count the time the host spends inside as a stall."""
        start = time.perf_counter()
        try:
            yield
        finally:
            end = time.perf_counter()
            self.stalled(cause, end - start)
            self.blocked += end - start
            if self.timeline is not None:
                self.timeline.waited(HOST, cause, start, end)
