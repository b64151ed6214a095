"""What a timeline tells of the steps of a run, and of the plans in it. Reads `timeline.json.gz`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from torch_tiers.migrator.model.fields import MOST_SECONDS, BadField, field, finite, parse, record, text, whole
from torch_tiers.migrator.planner.intervals import Bytes, Floats
from torch_tiers.migrator.telemetry.trace_events import EVENTS, STEPS

PLAN = "plan by "  # how the name of an event begins that says that a plan was adopted
ANEW = "learns anew"
VERDICT = "monitor"  # what it says of the memory bus has changed

micros = partial(finite, low=-1e6 * MOST_SECONDS, high=1e6 * MOST_SECONDS)
_number = partial(whole, high=1 << 62)


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that happened: its step, its name and what else is said of it."""

    step: float
    name: str
    more: str


@dataclass(frozen=True, slots=True)
class History:
    """The steps of a run.

    Attributes
    ----------
    numbers : array of int
        Their numbers; of several that are told as one, the last.
    seconds : array of float
        What each took.
    marks : tuple of Mark
        The plans, the monitor's verdicts, and where a program was recorded anew.
    dropped : int
        Events that the timeline did not keep: early ones, of steps that were not slow.
    """

    numbers: Bytes
    seconds: Floats
    marks: tuple[Mark, ...]
    dropped: int


def history_from_json(content: str) -> History:
    """Read a timeline.

    Raises
    ------
    ValueError
        If the text is no JSON, or a `BadField` if it says what no run writes.
    """
    data = record(parse(content), "timeline")
    events = field(data, "traceEvents")
    if not isinstance(events, list):
        raise BadField("traceEvents", "is not a list")
    steps, marks = [], []
    for event in events:
        kind = event.get("cat") if isinstance(event, dict) else None
        if kind == STEPS:
            steps.append(_step(event))
        elif kind == EVENTS and text(field(event, "name", "event"), "event.name").startswith((PLAN, ANEW, VERDICT)):
            marks.append((micros(field(event, "ts", "event"), "event.ts"), event))
    ends, numbers, seconds = (np.array(column) for column in zip(*sorted(steps), strict=True)) if steps else _NONE
    found = tuple(_mark(event, _at(at, ends, numbers)) for at, event in sorted(marks, key=lambda mark: mark[0]))
    told = record(data.get("otherData", {}), "otherData")
    return History(
        numbers.astype(np.int64), seconds, found, _number(told.get("dropped_events", 0), "otherData.dropped_events")
    )


_NONE = (np.zeros(0), np.zeros(0), np.zeros(0))


def _step(event: Mapping[str, Any]) -> tuple[float, int, float]:
    """The end of a step in microseconds, its number, and its seconds."""
    begin, took = (micros(field(event, name, "step"), f"step.{name}") for name in ("ts", "dur"))
    first, last = step_of(text(field(event, "name", "step"), "step.name"))
    return begin + took, last, took / 1e6 / max(1, last - first + 1)


def step_of(name: str) -> tuple[int, int]:
    """The first and the last number in the name of a step: ``step 7``, or ``steps 3 to 7``."""
    words = name.split()
    if len(words) not in (2, 4) or not all(
        word.isascii() and word.isdigit() and len(word) < 16 for word in words[1::2]
    ):
        raise BadField("step.name", "is no name of a step")
    return int(words[1]), int(words[-1])


def _at(at: float, ends: Floats, numbers: Floats) -> float:
    """The step in which something happened at some microsecond."""
    following = int(np.searchsorted(ends, at))
    if following < len(numbers):
        return float(numbers[following])
    return float(numbers[-1]) if len(numbers) else 0.0


def _mark(event: Mapping[str, Any], step: float) -> Mark:
    more = event.get("args", {})
    said = more.get("plan", more.get("says", "")) if isinstance(more, dict) else ""
    return Mark(step, event["name"], said if isinstance(said, str) else "")
