"""The most bytes that a GPU's program had in use, as its core tells it: without PyTorch's statistics.

To read those takes a tenth of a millisecond, and periods begin with it, while the device has nothing to do. Nor does
the program, which may read and reset PyTorch's peaks itself, notice anything.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from allocator.native import Core


class Peaks:
    """Peaks of periods, and of laps: the parts of a period that are measured. Of all threads alike.

    Parameters
    ----------
    core : callable
        Returns the GPU's core; None before its first request, until when nothing is in use.
    """

    def __init__(self, core: Callable[[], Core | None]) -> None:
        self._core = core
        self._highest = 0  # of the laps since the last restart
        self._lock = threading.Lock()

    def lap(self, *, with_present: bool = False) -> int:
        """The most bytes in use since the last lap or restart; see `Core.lap`."""
        with self._lock:
            return self._lap(with_present)

    def restart(self) -> tuple[int, int]:
        """Begin a new peak, at what is in use; the one since the last restart, and what `retries` tells."""
        with self._lock:
            self._lap(with_present=True)
            peak, self._highest = self._highest, 0
        return peak, self.retries()

    def retries(self) -> int:
        """How often the budget was exceeded until what lay idle went back."""
        core = self._core()
        return core.retries() if core is not None else 0

    def _lap(self, with_present: bool) -> int:
        core = self._core()
        peak = core.lap(with_present=with_present) if core is not None else 0
        self._highest = max(self._highest, peak)
        return peak
