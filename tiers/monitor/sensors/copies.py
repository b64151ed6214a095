"""The runtime's own copies: always there, and needs no permission."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median

from torch_tiers.migrator.model.links import DIRECT
from torch_tiers.migrator.telemetry.transfers import Transfer
from torch_tiers.monitor.calibration import Calibration, Kind, kind_of
from torch_tiers.monitor.sensors import Clock, Rate, Reading

_OPPOSITE = {"d2h": "h2d", "h2d": "d2h"}
_QUIET, _BUSY = 0.1, 0.5  # part of a copy's time in which the other lane copied, too; in between it tells nothing


class Copies:
    """Achieved against calibrated bandwidth of each lane.

    The median over the copies of a reading: one that the driver held up says nothing about the bus.
    """

    name = "copies"

    def __init__(self, calibration: Calibration, clock: Clock = time.monotonic) -> None:
        self._calibration = calibration
        self._clock = clock
        self._fed: deque[tuple[Sequence[Transfer], Mapping[str, int]]] = deque(
            maxlen=64
        )  # iterations, if nobody reads them
        self._rates: dict[str, Rate] = {}

    def feed(self, transfers: Sequence[Transfer], moved: Mapping[str, int]) -> None:
        """Take in an iteration: its copies, and the bytes moved so far by lane. From any thread."""
        self._fed.append((transfers, moved))

    def why_not(self) -> str | None:  # noqa: D102
        return None

    def read(self) -> Reading | None:  # noqa: D102
        iterations = [self._fed.popleft() for _ in range(len(self._fed))]
        if not iterations:
            return None
        values: dict[str, float] = {}
        found: dict[Kind, list[float]] = {}
        for transfers, _ in iterations:
            for copy, shared in sound(transfers):
                kind = kind_of(copy.lane, copy.nbytes, shared)
                found.setdefault(kind, []).append(copy.nbytes / (copy.end - copy.begin))
        fair: dict[str, list[float]] = {}
        alone: dict[str, list[float]] = {}
        for kind, bandwidths in found.items():
            self._calibration.learn(kind, bandwidths)
            for parts, expected in (
                (fair, self._calibration.expected(kind)),
                (alone, self._calibration.expected(kind._replace(shared=False))),
            ):
                if expected:
                    parts.setdefault(kind.lane, []).extend(min(rate / expected, 1.0) for rate in bandwidths)
        values |= {lane: median(parts) for lane, parts in fair.items()}
        values |= {f"{lane}.alone": median(parts) for lane, parts in alone.items()}
        at = self._clock()
        moved = {lane: self._rates.setdefault(lane, Rate())(at, total) for lane, total in iterations[-1][1].items()}
        values |= {f"{lane}.moved": rate for lane, rate in moved.items() if rate is not None}
        if any(rate is not None for rate in moved.values()):
            values["ours"] = sum(rate for lane, rate in moved.items() if rate is not None and lane not in DIRECT)
        return Reading(at, values)


def sound(transfers: Iterable[Transfer]) -> Iterator[tuple[Transfer, bool]]:
    """The copies whose times make sense, each with whether the other lane was busy throughout."""
    lanes: dict[str, list[Transfer]] = {}
    for copy in transfers:
        if copy.end > copy.begin:
            lanes.setdefault(copy.lane, []).append(copy)
    for lane, copies in lanes.items():
        others = lanes.get(_OPPOSITE.get(lane, ""), [])
        for copy in copies:
            overlap = 0.0
            for other in others:
                if other.begin < copy.end and copy.begin < other.end:
                    overlap += min(copy.end, other.end) - max(copy.begin, other.begin)
            part = overlap / (copy.end - copy.begin)
            if part < _QUIET or part > _BUSY:
                yield copy, part > _BUSY
