"""Sensors: what can be seen of the memory bus, a file each, all behind one protocol.

A reading maps names to numbers:

| name | meaning |
|---|---|
| ``d2h``, ``h2d`` | achieved by our copies, as a part of what the lane gives while the host is quiet |
| ``d2h.alone``, ``h2d.alone`` | the same as a part of what it gives while the other lane is quiet, too |
| ``d2h.moved``, ..., ``gds_read.moved`` | bytes per second that we move on a lane |
| ``ours`` | the sum of those that cross host memory: all but ``gds_write`` and ``gds_read`` |
| ``traffic`` | bytes per second on the memory bus, everybody's |
| ``rx``, ``tx`` | bytes per second over PCIe, into the GPUs and out of them |
| ``own``, ``tree``, ``others`` | cores busy with this process, its children, all other processes |
| ``load`` | the last two together, lately, without who plans for us |
| ``spare`` | part of the cores' time that is there for this process which its children leave, lately |
| ``tireless`` | part of the cores' time that children take which hardly ever wait for anybody |
| ``cpu``, ``memory`` | part of the time that somebody waited for one |
| ``copy`` | achieved by the timed copy on one core, as a part of its best |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

Clock = Callable[[], float]

TRAFFIC = frozenset({"resctrl", "uncore"})
"""The sensors that count ``traffic``: without one of them nobody knows whose that is."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What was seen at `at`, in seconds of the monotonic clock, since the reading before."""

    at: float
    values: Mapping[str, float]


class Sensor(Protocol):
    """One way to look."""

    name: str

    def why_not(self) -> str | None:
        """Why it cannot be used here, or None. Whatever it raises, the sensor is not used."""

    def read(self) -> Reading | None:
        """Look; None where there is nothing to tell yet. Whatever it raises, the sensor is given up."""


class Rate:
    """A counter that grows, as a number per second."""

    def __init__(self) -> None:
        self._last: tuple[float, float] | None = None

    def __call__(self, at: float, total: float) -> float | None:
        """The rate since the last call; None at the first, or where clock or counter went back."""
        before, self._last = self._last, (at, total)
        if before is None or at <= before[0] or total < before[1]:
            return None
        return (total - before[1]) / (at - before[0])


def rates(at: float, found: Iterable[tuple[str, float | None]]) -> Reading | None:
    """A reading of those that have a number; None if none has."""
    values = {name: value for name, value in found if value is not None}
    return Reading(at, values) if values else None


@dataclass(frozen=True, slots=True)
class Choice:
    """The sensors in use, and of the others the reason why not, by name."""

    sensors: tuple[Sensor, ...]
    refused: Mapping[str, str]


def choose(candidates: Sequence[Sequence[Sensor]]) -> Choice:
    """Of each row, whose sensors tell the same, the first that can be used; one that raises cannot."""
    sensors: list[Sensor] = []
    refused: dict[str, str] = {}
    for row in candidates:
        for sensor in row:
            try:
                reason = sensor.why_not()
            except Exception as error:  # such as what a driver shows that is like no other: nothing to end the rest for
                reason = f"{type(error).__name__}: {error}"
            if reason is None:
                sensors.append(sensor)
                break
            refused[sensor.name] = reason
    return Choice(tuple(sensors), refused)
