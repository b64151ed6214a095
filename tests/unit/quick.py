"""How long something takes, on machines that others use, too."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE = 60.0  # seconds in which one quick run is looked for


def quickest(work: Callable[[], object], within: float, clock: Callable[[], float] = time.process_time) -> float:
    """Return the seconds of the quickest of several runs of `work`; there are no more once one took less than `within`.

    Cores that are shared are half as fast for seconds at a time. One run shows what the code can do.
    """
    deadline = time.monotonic() + PATIENCE
    best = float("inf")
    while best >= within and time.monotonic() < deadline:
        begin = clock()
        work()
        best = min(best, clock() - begin)
    return best
