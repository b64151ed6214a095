"""Events of a device whose clock is the host's."""

from __future__ import annotations

import time


class Mark:
    """Passed so many seconds from when it was recorded."""

    def __init__(self, late: float = 0.0) -> None:
        self.at = time.perf_counter() + late

    def query(self) -> bool:
        return time.perf_counter() >= self.at

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Mark) -> float:
        assert self.query() and end.query(), "the driver would refuse this"
        return 1e3 * (end.at - self.at)
