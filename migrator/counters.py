"""What the runtime counts: bytes per lane, stalls by cause, groups. Plain numbers, read by `stats`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

LANES = ("d2h", "h2d", "disk_write", "disk_read")


@dataclass(slots=True)
class Stall:
    """How often, and for how long in seconds, somebody waited for one cause."""

    count: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class Counters:
    """Totals over the life of a session, of all its devices."""

    moved: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LANES, 0))
    stalls: dict[str, Stall] = field(default_factory=dict)
    groups: int = 0

    def stalled(self, cause: str, seconds: float, times: int = 1) -> None:
        """Add a wait of `seconds`, which stands for so many like it."""
        stall = self.stalls.setdefault(cause, Stall())
        stall.count += times
        stall.seconds += times * seconds

    @contextmanager
    def waiting(self, cause: str) -> Iterator[None]:
        """Count the time the host spends inside as a stall."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.stalled(cause, time.perf_counter() - start)
