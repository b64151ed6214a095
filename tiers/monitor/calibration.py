"""What a lane should give, by the size of the copy: as measured before, and as seen in this run. Pure."""

from __future__ import annotations

from bisect import bisect, insort
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

from torch_tiers.allocator.sizes import MiB

FULL = (16 * MiB).bit_length()  # copies from here on run at the link's full speed
SUSTAINED = 5  # readings that a bandwidth must last for to count as what the lane can give ...
BLOCK = 100  # ... and of so many such bandwidths in a row ...
OFTEN = 5  # ... more than one in so many must be as high: a burst, as at a boost clock, is nothing to hold a run to
ALIKE = 1.01  # times a bandwidth is no other one: the highest of those that are alike counts
BLOCKS = 10  # that are remembered: a lane may give less for good, which would pass for a load as long
NEAR = 0.9  # of what was measured before: from there on, what was seen in this run counts

Curve = Sequence[tuple[float, float]]
"""(bytes per second of host traffic, part of the lane that is left), by rising traffic."""


class Kind(NamedTuple):
    """Copies that should run at one speed: of a lane, of a size class, and with the other lane quiet or busy."""

    lane: str
    size: int
    shared: bool


def kind_of(lane: str, nbytes: int, shared: bool) -> Kind:
    """The kind of a copy: sizes are told apart by powers of two, up to that of full speed."""
    return Kind(lane, min(nbytes.bit_length(), FULL), shared)


class _Best:
    """What copies of one kind can get, by what they got in the last `BLOCK` times `BLOCKS` readings."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=SUSTAINED)
        self._block: list[float] = []  # what lasted for `SUSTAINED` readings, by rising bandwidth
        self._past: deque[float] = deque(maxlen=BLOCKS)

    def add(self, bandwidth: float) -> None:
        """Take in a reading."""
        self._recent.append(bandwidth)
        if len(self._recent) >= SUSTAINED - 1:  # at the very beginning one less will do
            insort(self._block, min(self._recent))
        if len(self._block) == BLOCK:
            self._past.append(self._often(1 + BLOCK // OFTEN))
            self._block = []

    @property
    def value(self) -> float:
        """Bytes per second, after one reading at least."""
        # The first block counts as far as it goes, later ones once it is sure that enough of them is as fast.
        rank = 1 + (BLOCK if self._past else len(self._block)) // OFTEN
        now = [self._often(rank)] if len(self._block) >= rank else []
        return max([*self._past, *now], default=min(self._recent))

    def _often(self, rank: int) -> float:
        """What `rank` of the block reach, or all but reach."""
        return self._block[bisect(self._block, ALIKE * self._block[-rank]) - 1]


class Calibration:
    """Expected bandwidths of the lanes: a copy is judged by others of its kind.

    Parameters
    ----------
    measured
        Bytes per second of a lane as ``tiers probe --write`` found them; None where it has not.
    curves
        What `curves_of` makes of ``tiers probe --contention --json``, by lane.
    """

    def __init__(
        self, measured: Mapping[str, float | None] | None = None, curves: Mapping[str, Curve] | None = None
    ) -> None:
        self._measured = measured or {}
        self._curves = curves or {}
        self._best: dict[Kind, _Best] = {}

    def learn(self, kind: Kind, bandwidths: Sequence[float]) -> None:
        """Take in what copies of one kind achieved since the last reading."""
        self._best.setdefault(kind, _Best()).add(median(bandwidths))

    def expected(self, kind: Kind) -> float | None:
        """Bytes per second that such a copy gets while nobody else loads the bus; None if that is not known."""
        seen = best.value if (best := self._best.get(kind)) is not None else None
        measured = self._measured.get(kind.lane) if kind.size == FULL and not kind.shared else None
        # A probe has the link to itself: beside computation the same lane may always give a little less.
        return measured if measured and (seen or 0.0) < NEAR * measured else seen

    def left_at(self, lane: str, traffic: float) -> float | None:
        """The part of `lane` that is left at so much host traffic, in bytes per second; None if not measured."""
        curve = self._curves.get(lane)
        if not curve:
            return None
        if traffic <= curve[0][0]:
            return curve[0][1]
        for (low, before), (high, after) in pairwise(curve):
            if low <= traffic <= high and low < high:
                return before + (after - before) * (traffic - low) / (high - low)
        return curve[-1][1]


def curves_of(report: Mapping[str, Any]) -> dict[str, Curve]:
    """The curve of each lane that a report of ``tiers probe --contention --json`` has.

    Raises
    ------
    ValueError
        If it is no such report.
    """
    curves: dict[str, Curve] = {}
    try:
        for result in report["results"]:
            lane, loaded = result["path"]["lane"], result["loaded"]
            points = sorted((sample["host_traffic"], sample["bandwidth"]) for sample in loaded)
            if lane is not None and points and points[0][1] > 0:
                curves[lane] = [(float(traffic), min(rate / points[0][1], 1.0)) for traffic, rate in points]
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a report of tiers probe --json ({error!r})") from None
    if not curves:
        raise ValueError("no lane in it was measured under load")
    return curves
