"""From readings to a verdict: what is left of lanes and bus, and who takes the rest. Pure.

A lane's estimate is an exponential average over the median of three readings: a single reading that is off
changes nothing, a step shows after three. Two thresholds, well apart, keep a level in between from
flapping; one that stays there is no saturation: what a lane gives may have changed for good.

A lane gives less than it should in two cases that call for different answers: while both of ours are busy
(`alone` low, the fair part high) nobody is to be made room for; if it is slow beyond that, the bus is loaded. By whom
its traffic tells, where a sensor counts that.

A lane may be slow without the bus, too: another rank or a collective shares its PCIe link, or a late host its times. A
copy on one core tells: while that is as fast as ever, and most cores rest, nothing is said of the bus. (A load that was
there from the beginning is what the copy takes for normal; but it takes cores.)

There is a third case, in which every lane gives all it has: the program's own workers keep the cores busy, or do not
rest. Then the input pipeline is what gives out, and each byte of ours on the bus takes some of its time: beside 26 GB/s
of copies fourteen processes that decode JPEGs lost 5%, and nine that copy 11%, and no lane was slower.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Mapping
from statistics import median

from torch_tiers.migrator.runtime.backoff import Cause, State, Verdict
from torch_tiers.monitor.calibration import Calibration
from torch_tiers.monitor.sensors import Reading

LANES = ("d2h", "h2d")  # those that cross the bus and the PCIe link
ENTER = 0.85  # below this part of a lane the bus is saturated ...
LEAVE = 0.93  # ... until there is more than this
MIDDLING = 100  # readings in between after which that is taken for what the lane gives now
CALM = 10  # readings in a row above `LEAVE` until the bus is called free
SMOOTH = 0.7  # weight of the newest in the average: what falls to 0.83 at once is below `ENTER` at the third reading
STALE = 20  # readings without a copy after which a lane's estimate says nothing any more
BLIND = 100  # readings without any lane after which a load is taken to have ended
GAP = 60.0  # seconds without a reading, as after a suspend, after which a lane is judged afresh, at least ...
GAPS = 3  # ... and usual times between two readings: a program's iterations may be as long
USUAL = 5  # of those times make the usual one, their median
LIGHTER = 0.5  # of the load that there is while the bus is saturated: below it the load is taken to have ended
AVERAGED = 0.03  # weight of a reading in that load: known late, as cores are read once a second, and with few spikes
BUSY = 0.25  # of the cores are left by our workers: less, and these are what training waits for ...
IDLE = 0.45  # ... until there is more than this
MANY = 0.1  # of the cores are kept busy by those of our workers that do not rest: so many, and training may wait ...
FEW = 0.05  # ... until there are fewer
RESTING = 0.25  # of the cores are busy beside this process: with fewer nobody saturates the bus
OURS = 0.7  # of the traffic on the bus: if so much of it is ours, nobody else is to blame


class Level:
    """The estimate of one number between 0 and 1, and for how many readings it has not been renewed."""

    def __init__(self) -> None:
        self._begin()
        self.age = STALE + 1

    def _begin(self) -> None:
        self._recent = deque((1.0, 1.0), maxlen=3)
        self._average = 1.0

    def add(self, value: float | None) -> None:
        """Take in one reading; None is one that is missing."""
        if value is None or not (math.isfinite(value) and value >= 0):
            self.age += 1
            return
        if self.age > STALE:
            self._begin()  # what was true that long ago says nothing of now
        self.age = 0
        self._recent.append(min(value, 1.0))
        self._average += SMOOTH * (median(self._recent) - self._average)

    @property
    def value(self) -> float | None:
        """The estimate; None before the first reading, and when it is stale."""
        return self._average if self.age <= STALE else None


class Judge:
    """Takes readings in, one at a time, and holds the verdict.

    Parameters
    ----------
    calibration
        Tells what a lane gives at a host traffic, for times in which nothing of ours moves.
    cores
        Of the machine.
    """

    def __init__(self, calibration: Calibration | None = None, cores: int | None = None) -> None:
        self._few = RESTING * (cores or os.cpu_count() or 1)
        self._loaded = False
        self._copies = False  # the timed copy is as fast as ever
        self._calibration = calibration or Calibration()
        self._last = float("-inf")
        self._between: deque[float] = deque(maxlen=USUAL)
        self._begin_afresh()
        self._state: State = "free"
        self._calm = 0
        self._middling = 0
        self._blind = 0
        self._crowded = False  # our workers keep the cores busy
        self._only_crowded = False  # nothing but that has made the verdict what it is
        self._load: float | None = None  # while the bus is saturated
        self.verdict = Verdict()

    def _begin_afresh(self) -> None:
        self._fair = {lane: Level() for lane in LANES}
        self._alone = {lane: Level() for lane in LANES}
        self._copy = Level()

    def judge(self, reading: Reading) -> Verdict:
        """The verdict with `reading` taken in; one that is older than the last counts for nothing."""
        if reading.at <= self._last:
            return self.verdict
        since = reading.at - self._last
        if since > max(GAP, GAPS * median(self._between or (0.0,))):
            self._begin_afresh()
        if math.isfinite(since):  # not before the first
            self._between.append(since)
        self._last = reading.at
        values = reading.values
        for lane in LANES:
            self._fair[lane].add(values.get(lane))
            self._alone[lane].add(values.get(f"{lane}.alone"))
        self._copy.add(values.get("copy"))
        copy = self._copy.value
        self._copies = copy is not None and copy > (ENTER if self._copies else LEAVE)
        spare, tireless = values.get("spare", 1.0), values.get("tireless", 0.0)
        self._crowded = spare < (IDLE if self._crowded else BUSY) or tireless >= (FEW if self._crowded else MANY)
        load = values.get("load")
        self._loaded = load is not None and load >= self._few
        lighter = load is not None and self._load is not None and load < LIGHTER * self._load
        left = {lane: level.value for lane, level in self._fair.items() if level.value is not None}
        if any(lane in values for lane in LANES):
            self._blind = 0
            self._seen(min(left.values(), default=1.0), lighter=lighter)
        else:
            self._blind += 1
            self._unseen(_others(values), lighter=lighter)
        if self._state == "free":
            self._load = None
        elif load is not None and not lighter:
            self._load = load if self._load is None else self._load + AVERAGED * (load - self._load)
        self.verdict = Verdict(*self._whose(left, values), left, self._bus(left, values))
        return self.verdict

    def _seen(self, left: float, *, lighter: bool) -> None:
        slow = left < ENTER and not self._bus_is_fine()
        if slow or self._crowded:
            if self._state == "free":
                self._only_crowded = True
            self._only_crowded &= not slow
            self._state, self._calm, self._middling = "saturated", 0, 0
        elif left > LEAVE or self._bus_is_fine() or self._only_crowded or lighter or self._middling >= MIDDLING:
            self._recover()
        else:
            self._calm = 0
            self._middling += 1

    def _unseen(self, others: float | None, *, lighter: bool) -> None:
        """Nothing of ours was copied: keep the verdict until something tells that the load has ended."""
        if self._crowded:
            return
        free = others is not None and all(
            (part := self._calibration.left_at(lane, others)) is not None and part > LEAVE for lane in LANES
        )
        copies = self._copy.value is not None and self._copy.value > LEAVE
        if self._only_crowded or lighter or free or copies or self._blind >= BLIND:
            self._recover()

    def _bus_is_fine(self) -> bool:
        """Whether nothing speaks of a busy bus but a slow lane, which may have other reasons."""
        return self._copies and not self._loaded

    def _recover(self) -> None:
        if self._state == "free":
            return
        self._calm += 1
        self._state = "free" if self._calm >= CALM else "recovering"

    def _whose(self, left: Mapping[str, float], values: Mapping[str, float]) -> tuple[State, Cause]:
        if self._state != "free":
            lanes_are_fine = min(left.values(), default=1.0) >= ENTER or self._bus_is_fine()
            return self._state, "workers" if self._crowded and lanes_are_fine else _cause(values)
        alone = [level.value for level in self._alone.values() if level.value is not None and level.age == 0]
        return ("saturated", "us") if alone and min(alone) < ENTER else ("free", "nobody")

    def _bus(self, left: Mapping[str, float], values: Mapping[str, float]) -> float:
        """What is left of the bus: by the lanes that cross it, the timed copy, and the traffic of others."""
        known = [] if self._bus_is_fine() else [*left.values()]
        if self._copy.value is not None:
            known.append(self._copy.value)
        others = _others(values)
        if others is not None:
            parts = (self._calibration.left_at(lane, others) for lane in LANES)
            known += [part for part in parts if part is not None]
        return min(known, default=1.0)


def said(state: str, cause: str) -> str:
    """What is saturated, and by whom."""
    if state != "saturated":
        return f"memory bus {state}"
    if cause == "workers":
        return "cores busy with our workers"
    return f"memory bus {state}" + (", by whom is unknown" if cause == "unknown" else f" by {cause}")


def _cause(values: Mapping[str, float]) -> Cause:
    traffic, ours = values.get("traffic"), values.get("ours")
    if not traffic or ours is None:
        return "unknown"
    return "us" if ours > OURS * traffic else "others"


def _others(values: Mapping[str, float]) -> float | None:
    if "traffic" in values and "ours" in values:
        return max(values["traffic"] - values["ours"], 0.0)
    return None
