"""A monitor that is there or not, within one session."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence

import psutil

from torch_tiers.migrator.runtime.backoff import Response
from torch_tiers.migrator.telemetry.now import Now
from torch_tiers.migrator.telemetry.transfers import Transfer
from torch_tiers.monitor.build import available_sensors
from torch_tiers.monitor.calibration import Calibration
from torch_tiers.monitor.sensors import copies as own
from torch_tiers.monitor.thread import NAME, Monitor
from torch_tiers.monitor.verdict import LANES, Judge
from torch_tiers.monitor.watch import Watch


class Switch:
    """The advisor of the session: a fresh monitor while it is on, nobody while it is off."""

    def __init__(self, calibration: Calibration) -> None:
        self._calibration = calibration  # kept: what a lane can give does not change
        self.monitor: Monitor | None = None
        self.times: list[float] = []
        self._looked = 0

    def set(self, on: bool) -> None:
        if self.monitor is not None:
            self.monitor.close()
        self.monitor, self.times, self._looked = None, [], 0
        if on:
            choice = available_sensors(probe=False)  # afresh: what others have seen was another load
            copies, judge = own.Copies(self._calibration), Judge(self._calibration)
            self.monitor = Monitor(Watch(lambda: choice, copies, judge))

    @property
    def share(self) -> float:
        """Of the usual demand, what the monitor leaves."""
        return self.monitor.watch.backoff.share if self.monitor is not None else 1.0

    def look(self) -> float | None:
        """The least that a lane gave, by the last reading alone; None if that was known before, or tells of no lane."""
        if self.monitor is None or (steps := self.monitor.watch.steps) == self._looked:
            return None
        values = self.monitor.watch.state()["values"]
        lanes = [values[lane] for lane in LANES if lane in values]
        self._looked = steps if lanes else self._looked  # else it has ticked since, and shows other sensors alone
        return min(lanes, default=None)

    @property
    def cpu(self) -> float:
        """Processor seconds that the monitor's thread has taken."""
        threads = {thread.native_id for thread in threading.enumerate() if thread.name == NAME}
        times = psutil.Process().threads() if threads else []
        return float(sum(taken.user_time + taken.system_time for taken in times if taken.id in threads))

    def iteration_over(self, transfers: Sequence[Transfer], moved: Mapping[str, int], now: Now) -> Response:
        if self.monitor is None:
            return Response()
        start = time.perf_counter()
        response = self.monitor.iteration_over(transfers, moved, now)
        self.times.append(time.perf_counter() - start)
        return response
