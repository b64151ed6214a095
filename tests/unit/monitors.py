"""Monitors whose sensors and clock say what a test has them say."""

from __future__ import annotations

from collections.abc import Callable

from torch_tiers.migrator.runtime.backoff import Response
from torch_tiers.migrator.telemetry.timeline import Timeline
from torch_tiers.migrator.telemetry.transfers import Transfer
from torch_tiers.monitor.calibration import Calibration
from torch_tiers.monitor.sensors import Choice, Reading
from torch_tiers.monitor.sensors.copies import Copies
from torch_tiers.monitor.verdict import Judge
from torch_tiers.monitor.watch import EVERY, Watch

MiB = 1 << 20


class Spoken:
    """A sensor that says what it is told to."""

    name = "spoken"

    def __init__(self, say: Callable[[], Reading | None]) -> None:
        self.say = say
        self.reads = 0

    def why_not(self) -> str | None:
        return None

    def read(self) -> Reading | None:
        self.reads += 1
        return self.say()


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def watch(
    *sensors: Spoken,
    clock: Callable[[], float] | None = None,
    h2d: float = 64.0 * MiB,
    timeline: Timeline | None = None,
) -> Watch:
    calibration = Calibration({"h2d": h2d})
    clock = clock or Clock()
    return Watch(lambda: Choice(sensors, {}), Copies(calibration, clock), Judge(calibration), clock, timeline)


def iteration(of: Watch, clock: Clock, left: float = 1.0, moved: int = 0) -> Response:
    """An iteration passes in which the lane gave so much."""
    clock.now += EVERY
    of.feed([Transfer("h2d", 64 * MiB, 0.0, 1 / left)], {"h2d": moved})
    return of.tick()
