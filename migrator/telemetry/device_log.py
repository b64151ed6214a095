"""What the groups of one device do, and what is in use: for the timeline, and for who watches the run."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping

from torch_tiers.migrator.telemetry.counters import Counters


class DeviceLog:
    """Told of each group and each iteration, never of single tensors. Without a timeline it keeps the last peak alone.

    Parameters
    ----------
    device : str
        What the timeline calls it.
    counters : Counters
        Count iterations, and have the timeline.
    budget : int
        HBM that the process may use, in bytes.
    beside : int
        Bytes of it outside of PyTorch's allocator, which peaks leave out.
    below : callable
        Returns the bytes in use of each tier below HBM, in all of the process.

    Attributes
    ----------
    peak : int
        The most bytes of HBM in use in the last iteration; 0 before there was one.
    budget : int
        As above.
    """

    def __init__(
        self,
        device: str,
        counters: Counters,
        budget: int = 0,
        beside: int = 0,
        below: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        self.peak = 0
        self._device, self._hbm = device, f"{device} hbm"
        self.budget, self._beside = budget, beside
        self._below = below
        self._counters, self._timeline = counters, counters.timeline
        self._began = time.perf_counter()  # the iteration under way
        # By engine: each thread has one, which goes with it.
        self._saved: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()

    def offloaded(self, nbytes: int, begin: float) -> int:
        """A group's offload was asked for, from `begin` until now; return a number by which to tell the group."""
        if self._timeline is None:
            return 0
        iteration = self._counters.iterations + 1
        return self._timeline.offloaded(self._device, iteration, nbytes, begin, time.perf_counter())

    def prefetched(self, group: int, nbytes: int, begin: float) -> None:
        """The prefetch of a group that is told by this number was asked for, from `begin` until now."""
        if self._timeline is not None:
            iteration = self._counters.iterations + 1
            self._timeline.prefetched(self._device, iteration, group, nbytes, begin, time.perf_counter())

    def saved(self, engine: object, nbytes: int) -> None:
        """So many bytes of an engine's saved tensors are in HBM now."""
        if self._timeline is None or self._saved.get(engine) == nbytes:
            return
        self._saved[engine] = nbytes
        now = time.perf_counter()
        of_all = nbytes if len(self._saved) == 1 else sum(self._saved.values())
        self._timeline.counted_at_group(self._hbm, now, ("saved", of_all))
        for tier, used in self._below().items():
            self._timeline.counted_at_group(tier, now, ("in use", used))

    def iteration_over(self, engine: object, peak: int, nbytes: int) -> None:
        """An iteration is over whose `peak` is this; so many bytes of the engine's saved tensors are still in HBM."""
        self.peak = peak + self._beside
        if self._timeline is None:
            return
        self._saved[engine] = nbytes
        began, self._began = self._began, time.perf_counter()
        self._timeline.counted(self._hbm, began, ("peak", self.peak), ("budget", self.budget))
        self._timeline.counted(self._hbm, self._began, ("saved", sum(self._saved.values())))
        for tier, used in self._below().items():
            self._timeline.counted(tier, self._began, ("in use", used))
