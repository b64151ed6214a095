"""One look at everything: sensors, verdict, back-off, and what there is to say of it."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch_tiers.migrator.runtime.backoff import Backoff, Response, Verdict
from torch_tiers.migrator.telemetry.timeline import Timeline
from torch_tiers.migrator.telemetry.transfers import Transfer
from torch_tiers.monitor.allowance import Allowance
from torch_tiers.monitor.sensors import Choice, Sensor
from torch_tiers.monitor.sensors.copies import Copies
from torch_tiers.monitor.verdict import Judge, said

log = logging.getLogger("tiers")

EVERY = 1.0  # seconds between two reads of a sensor other than our own copies, at least
PART = 0.002  # of one core that reading a sensor may take, on average ...
ATONCE = 0.05  # ... and processor seconds of that at once
SLOW = 2.0  # seconds: a sensor that takes longer has stalled
KEPT = 3.0  # intervals for which a reading counts, if none follows
LARGEST = 1e15  # no number of bytes per second, cores or parts is larger
BLANK = 5  # readings of no traffic at all while we move much
MUCH = 100e6  # bytes per second
REMEMBERED = 20  # changes of mind


@dataclass(slots=True)
class _Slot:
    """A sensor in use, and what it said last."""

    sensor: Sensor
    allowance: Allowance = field(default_factory=lambda: Allowance(PART, ATONCE))
    due: float = float("-inf")
    until: float = float("-inf")
    values: Mapping[str, float] = field(default_factory=dict)


class Watch:
    """What the monitor's thread does, without the thread.

    Parameters
    ----------
    choose
        Finds the sensors to read besides `copies`, at the first tick: some take a while to look for.
    copies
        The runtime's own copies: an iteration of them is a step.
    timeline
        Is told of changes of mind, if there is one.
    """

    def __init__(
        self,
        choose: Callable[[], Choice],
        copies: Copies,
        judge: Judge,
        clock: Callable[[], float] = time.monotonic,
        timeline: Timeline | None = None,
    ) -> None:
        self.copies = copies
        self.backoff = Backoff()
        self.steps = 0
        self.backed_off = 0  # steps with a share below 1
        self.changes: deque[str] = deque(maxlen=REMEMBERED)
        self.refused: dict[str, str] = {}
        self._choose: Callable[[], Choice] | None = choose
        self._slots: list[_Slot] = []
        self._judge = judge
        self._clock = clock
        self._timeline = timeline
        self._values: dict[str, float] = {}
        self._blank = 0

    @property
    def sensors(self) -> list[str]:
        """Names of the sensors in use."""
        return [self.copies.name, *(slot.sensor.name for slot in self._slots)]

    @property
    def response(self) -> Response:
        """What the runtime is to do now."""
        return self.backoff.response

    def feed(self, transfers: Sequence[Transfer], moved: Mapping[str, int]) -> None:
        """Take in an iteration; from any thread."""
        self.copies.feed(transfers, moved)

    def tick(self) -> Response:
        """Read what is due, and take a step if an iteration has ended since the last tick."""
        if self._choose is not None:
            choice, self._choose = self._choose(), None
            self._slots = [_Slot(sensor) for sensor in choice.sensors]
            self.refused = dict(choice.refused)
        now = self._clock()
        for slot in list(self._slots):
            if now >= slot.due:
                self._read(slot, now)
        own = self.copies.read()
        self._values = {name: value for slot in self._slots if now < slot.until for name, value in slot.values.items()}
        if own is not None:
            self._values |= own.values
            self._drop_blank()
            self._step(self._judge.judge(type(own)(own.at, self._values)))
        return self.response

    def _step(self, verdict: Verdict) -> None:
        before, planned = self._mood(), bool(self.backoff.left)
        self.backoff = self.backoff.step(verdict)
        self.steps += 1
        self.backed_off += self.backoff.share < 1
        if (self._mood(), bool(self.backoff.left)) != (before, planned):
            self.say(f"{_describe(verdict, self._values)}: {_deed(self.backoff)}")

    def _mood(self) -> str:
        """What a change of mind is a change of: whether we make room, hold, or are as we always were."""
        if self.backoff.share == 1:
            return "full"
        return "rising" if self.backoff.unproven else "less"

    def say(self, text: str) -> None:
        """Log a change of mind, and remember it."""
        self.changes.append(text)
        log.info("monitor: %s", text)
        if self._timeline is not None:
            self._timeline.happened("monitor", says=text)

    # --------------------------------------------------------------------------------------- sensors

    def _read(self, slot: _Slot, now: float) -> None:
        start, spent = self._clock(), time.thread_time()
        try:
            reading = slot.sensor.read()
        except Exception as error:
            self._drop(slot, f"{type(error).__name__}: {error}")
            return
        if self._clock() - start > SLOW:
            self._drop(slot, f"a read took {self._clock() - start:.1f} s")
            return
        every = max(EVERY, slot.allowance.take(time.thread_time() - spent, now))
        slot.due = now + every
        if reading is None:
            return
        nonsense = {k: v for k, v in reading.values.items() if not (math.isfinite(v) and 0 <= v < LARGEST)}
        if nonsense:
            self._drop(slot, f"it read {nonsense}")
            return
        slot.values, slot.until = reading.values, now + KEPT * every

    def _drop_blank(self) -> None:
        """Give up who counts the bus's traffic and sees none of what we move."""
        if self._values.get("traffic", math.inf) > 0 or self._values.get("ours", 0.0) < MUCH:
            self._blank = 0
            return
        self._blank += 1
        if self._blank >= BLANK:
            for slot in [slot for slot in self._slots if "traffic" in slot.values]:
                self._drop(slot, "it sees no traffic while there is ours")

    def _drop(self, slot: _Slot, reason: str) -> None:
        self._slots.remove(slot)
        self.refused[slot.sensor.name] = reason
        log.warning("monitor: goes on without its sensor %s: %s", slot.sensor.name, reason)

    # ----------------------------------------------------------------------------------------- state

    def state(self) -> dict[str, Any]:
        """What ``tiers top`` shows, as plain data."""
        verdict, response = self._judge.verdict, self.response
        return {
            "verdict": {"state": verdict.state, "cause": verdict.cause, "left": dict(verdict.left), "bus": verdict.bus},
            "response": {"share": self.backoff.share, "ahead": response.ahead, "plan": dict(response.left)},
            "values": dict(self._values),
            "refused": dict(self.refused),
            **self.summary(),
        }

    def summary(self) -> dict[str, Any]:
        """What a run leaves in its ``stats.json``: steps are iterations that were judged."""
        return {
            "sensors": self.sensors,
            "steps": self.steps,
            "backed_off": self.backed_off,
            "changes": list(self.changes),
        }


def _describe(verdict: Verdict, values: Mapping[str, float]) -> str:
    lanes = ", ".join(f"{lane} {part:.0%}" for lane, part in verdict.left.items())
    facts = [f"bandwidth left: {lanes}"] if lanes else ["nothing of ours moves"]
    if "traffic" in values:
        facts.append(f"{values['traffic'] / 1e9:.0f} GB/s on the bus, {values.get('ours', 0) / 1e9:.0f} of it ours")
    if "others" in values and "tree" in values:
        facts.append(f"cores busy: {values['tree']:.1f} with our workers, {values['others']:.1f} with others")
    return f"{said(verdict.state, verdict.cause)} ({'; '.join(facts)})"


def _deed(backoff: Backoff) -> str:
    response = backoff.response
    if response.ahead is None:
        return "no longer backed off"
    deed = f"at most {response.ahead} groups come back ahead"
    if response.left:
        deed += ", plans count on the bandwidth that is left"
    return f"{deed}; rising again" if backoff.unproven else deed
