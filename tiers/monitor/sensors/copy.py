"""The active probe: a timed copy of a few MiB on one core, now and then."""

from __future__ import annotations

import time
from collections import deque

import numpy as np

from torch_tiers.allocator.sizes import MiB
from torch_tiers.monitor.sensors import Clock, Reading

_BYTES = 8 * MiB  # with its destination past the share of a core in the caches that matter
_REMEMBERED = 200  # copies, of which the fast ones say what is normal

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


class TimedCopy:
    """Tells of the bus also while nothing of ours moves, and whether a slow lane is its doing."""

    name = "copy"

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self._clock = clock
        self._memory: tuple[Bytes, Bytes] | None = None
        self._recent: deque[float] = deque(maxlen=_REMEMBERED)

    def why_not(self) -> str | None:  # noqa: D102
        return None

    def read(self) -> Reading | None:  # noqa: D102
        if self._memory is None:
            self._memory = np.ones(_BYTES, np.uint8), np.zeros(_BYTES, np.uint8)
        source, target = self._memory
        start = self._clock()
        target[:] = source
        seconds = self._clock() - start
        if seconds <= 0:
            return None
        self._recent.append(1 / seconds)
        # Not the very best: that one may have found the source in a cache.
        normal = sorted(self._recent)[len(self._recent) * 9 // 10]
        return Reading(time.monotonic(), {"copy": min(1 / seconds / normal, 1.0)})
