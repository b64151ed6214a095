"""Measures the most bytes that a GPU's program needed, by its core.

Needed is what is in use, and what lies idle on streams other than the layout's. To read PyTorch's statistics instead
takes a tenth of a millisecond, at the begin of each period, when the device is idle; and it would reset the program's
own peaks.
"""

from __future__ import annotations

from collections.abc import Callable

from torch_tiers.allocator.native import PERIODS, Core


class PeaksOfCore:
    """Peaks of periods, and of the parts of them that are measured, whichever thread asks; `migrator.streams.Peaks`.

    Parameters
    ----------
    core : callable
        Returns the GPU's core; None before its first request, until when nothing is in use.
    """

    def __init__(self, core: Callable[[], Core | None]) -> None:
        self._core = core

    def take_peak(self, *, with_present: bool = False) -> int:
        """The most bytes in use since the last call, or now; see `Core.take_peak`."""
        core = self._core()
        return core.take_peak(with_present=with_present) if core is not None else 0

    def restart(self) -> tuple[int, int]:
        """Begin a new peak, at what is in use; the one since the last restart, and what `retries` tells."""
        core = self._core()
        return (core.take_peak(PERIODS, with_present=True), core.retries()) if core is not None else (0, 0)

    def delayed(self) -> float:
        """Seconds that requests have waited so far, in all threads, while pages were mapped or room was made."""
        core = self._core()
        return core.delayed() if core is not None else 0.0

    def retries(self) -> int:
        """How often HBM was full until idle pages were unmapped."""
        core = self._core()
        return core.retries() if core is not None else 0
