"""Why was a step slow? What it waited for beyond what steps wait as a rule, and what happened in it."""

from __future__ import annotations

import statistics
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch_tiers.allocator.errors import TiersError
from torch_tiers.allocator.sizes import format_size
from torch_tiers.migrator.model.fields import BadField, field, parse, record
from torch_tiers.migrator.telemetry.trace_events import EVENTS, HOST, STEPS, WAITS
from torch_tiers.planning.html.history import ANEW, PLAN, micros, step_of
from torch_tiers.run_directory import ENOUGH

LEARNED = "learned"  # an event that ends what `ANEW` begins, if no plan does
SLOW = 1.05  # times the median
WORTH = 0.005  # of the median: a wait that is not that much longer than as a rule explains nothing
WAITED_FOR = {
    "d2h": "copies to host memory (d2h)",
    "h2d": "copies back from host memory (h2d)",
    "disk_write": "writes to a drive, as host memory was full (disk_write)",
    "disk_read": "reads from a drive (disk_read)",
    "weights": "weights that lie in host memory (weights)",
    "state": "optimizer state that lies in host memory (state)",
    "gds_write": "writes from hbm to a drive (gds_write)",
    "gds_read": "reads from a drive into hbm (gds_read)",
}


@dataclass(frozen=True, slots=True)
class Timed:
    """Something that took a while: from when until when, in microseconds, and what."""

    begin: float
    end: float
    what: str
    more: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a timeline tells of steps, each in the order of their beginnings.

    Attributes
    ----------
    steps : list of Timed
        Their numbers are `numbers`; of several that are told as one, the last.
    waits, events : list of Timed
        What somebody waited for; what happened.
    on_gpu : bool
        Whether waits are a sample.
    """

    steps: list[Timed]
    numbers: list[int]
    waits: list[Timed]
    events: list[Timed]
    on_gpu: bool


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a step was slow.

    Attributes
    ----------
    text : str
        A sentence.
    seconds : float or None
        How much of the step it explains; None where that is not known.
    """

    text: str
    seconds: float | None


@dataclass(frozen=True, slots=True)
class SlowStep:
    """A step beside the others.

    Attributes
    ----------
    number : int
        Of the step.
    seconds, median : float
        What it took, and what steps take in the median, of so many `others`, under the last plan where that had enough.
    causes : tuple of Cause
        The largest first.
    sampled : bool
        Whether waits of a GPU may be missing.
    """

    number: int
    seconds: float
    median: float
    others: int
    causes: tuple[Cause, ...]
    sampled: bool

    @property
    def more(self) -> float:
        """Seconds beyond the median."""
        return self.seconds - self.median


def recorded_from_json(content: str) -> Recorded:
    """Read a timeline.

    Raises
    ------
    ValueError
        If the text is no JSON, or a `BadField` if it says what no run writes.
    """
    told = field(record(parse(content), "timeline"), "traceEvents")
    if not isinstance(told, list):
        raise BadField("traceEvents", "is not a list")
    kinds: dict[str, list[Timed]] = {STEPS: [], WAITS: [], EVENTS: []}
    gpus = False
    for event in told:
        if isinstance(event, dict) and event.get("cat") in kinds:
            kinds[event["cat"]].append(_timed(event))
        elif isinstance(event, dict) and event.get("name") == "thread_name":
            name = str(record(event.get("args", {}), "event.args").get("name"))
            gpus |= not name.startswith((HOST, "cpu"))
    for each in kinds.values():
        each.sort(key=lambda timed: timed.begin)
    numbers = [step_of(step.what)[1] for step in kinds[STEPS]]
    return Recorded(kinds[STEPS], numbers, kinds[WAITS], kinds[EVENTS], gpus)


def _timed(event: Mapping[str, Any]) -> Timed:
    begin = micros(field(event, "ts", "event"), "event.ts")
    name, more = field(event, "name", "event"), event.get("args", {})
    if not isinstance(name, str) or not isinstance(more, dict):
        raise BadField("event", "has no name, or no args")
    return Timed(begin, begin + micros(event.get("dur", 0), "event.dur"), name, more)


def look_at(told: Recorded, number: int) -> SlowStep:
    """Compare a step with the others.

    Raises
    ------
    TiersError
        If the timeline does not hold it.
    """
    at = _find(told, number)
    step = told.steps[at]
    others = [k for k in _settled(told) if k != at]
    if not others:
        raise TiersError(f"step {number} has no other step beside it: let the program make more of them")
    seconds = [_seconds(each) / _count(each) for each in told.steps]
    median = statistics.median(seconds[k] for k in others)
    waited = _waits(told)
    found = []
    for cause in {cause for _, cause in waited}:
        usual = statistics.median(waited.get((k, cause), 0.0) / _count(told.steps[k]) for k in others)
        more = waited.get((at, cause), 0.0) / _count(step) - usual
        if more > WORTH * median:
            text = f"{_ms(more + usual)} were spent waiting for {WAITED_FOR.get(cause, cause)}, {_ms(usual)} as a rule"
            found.append(Cause(text, more))
    found.sort(key=lambda cause: -(cause.seconds or 0.0))
    happened = [Cause(text, None) for text in _happened(told, step)]
    rest = seconds[at] - median - sum(cause.seconds or 0.0 for cause in found)
    # What happened is what is left of the difference.
    first_is_known = found and (found[0].seconds or 0.0) >= rest
    causes = [*found, *happened] if first_is_known else [*happened, *found]
    return SlowStep(number, seconds[at], median, len(others), tuple(causes), told.on_gpu)


def _find(told: Recorded, number: int) -> int:
    at = bisect_left(told.numbers, number)
    if at < len(told.numbers) and step_of(told.steps[at].what)[0] <= number:
        return at
    if not told.numbers:
        raise TiersError("the timeline holds no step: let the program make more than one")
    ends = f"{step_of(told.steps[0].what)[0]} to {told.numbers[-1]}"
    raise TiersError(
        f"the timeline does not hold step {number}: it has {len(told.steps)} of steps {ends}, the latest and the "
        "slowest; the first is never there, as nobody knows when it began"
    )


def _settled(told: Recorded) -> list[int]:
    """The steps that began under the last plan, or all where these are few."""
    planned = max((event.begin for event in told.events if event.what.startswith(PLAN)), default=float("-inf"))
    after = [k for k, step in enumerate(told.steps) if step.begin >= planned]
    return after if len(after) >= ENOUGH else [*range(len(told.steps))]


def _waits(told: Recorded) -> Mapping[tuple[int, str], float]:
    """Seconds by step and cause. A wait counts where it began."""
    begins = [step.begin for step in told.steps]
    found: dict[tuple[int, str], float] = defaultdict(float)
    for wait in told.waits:
        at = bisect_right(begins, wait.begin) - 1
        if at >= 0 and wait.begin < told.steps[at].end:
            found[at, wait.what] += _seconds(wait)
    return found


def _happened(told: Recorded, step: Timed) -> Iterator[str]:
    """Sentences about what happened in a step, and what was so as it began."""
    before = [event for event in told.events if event.begin < step.begin]
    within = [event for event in told.events if step.begin <= event.begin < step.end]
    plans = [event.begin for event in told.events if event.what.startswith(PLAN)]
    if plans and step.begin < plans[0]:
        yield "there was no plan yet: it was recorded, all that is saved may move, and recomputing is tried"
    elif next((event.what for event in reversed(before) if event.what.startswith((PLAN, ANEW, LEARNED))), None) == ANEW:
        yield "it was recorded anew, which takes a while: recomputing is tried"
    if any(event.what == ANEW for event in within):
        yield "from it on the program was recorded anew, as it did not go as any plan expects"
    for event in within:
        if event.what.startswith(PLAN):
            yield f"a new plan was adopted: {event.more.get('plan', event.what)}"
            break
    full = [event.more.get("bytes") for event in within if event.what == "hbm was full"]
    if full:
        sizes = [nbytes for nbytes in full if isinstance(nbytes, int)]
        where = f": {format_size(max(sizes))} lay in host memory" if sizes else ", and memory was unmapped"
        yield f"hbm was full{where}"
    for event in within:
        if event.what == "dram was short":
            yield f"host memory was short; others held: {event.more.get('others') or 'nothing'}"
            break
    says = [str(event.more.get("says")) for event in (*before[-1000:], *within) if event.what == "monitor"]
    now = [event for event in within if event.what == "monitor"]
    if says and (now or "come back ahead" in says[-1]):
        yield f"{'the monitor changed its mind' if now else 'the monitor had backed off'}: {says[-1]}"


def to_json(told: SlowStep) -> dict[str, Any]:
    """The step as JSON."""
    return {
        "step": told.number,
        "seconds": told.seconds,
        "median_s": told.median,
        "others": told.others,
        "causes": [{"text": cause.text, "seconds": cause.seconds} for cause in told.causes],
        "waits_are_a_sample": told.sampled,
    }


def render(told: SlowStep, recomputing: float) -> Iterator[str]:
    """The step in sentences; `recomputing` is what the plan foresees of that in each iteration, in seconds."""
    beside = f"{told.seconds / told.median:.2f} times the median of {told.others} others ({_ms(told.median)})"
    yield f"step {told.number} took {_ms(told.seconds)}, {beside}"
    slow = told.seconds > SLOW * told.median
    if not slow:
        yield "that is not slow"
    for cause in told.causes:
        yield f"- {cause.text}"
    known = [cause.seconds for cause in told.causes if cause.seconds is not None]
    rest = told.more - sum(known)
    if slow and rest > WORTH * told.median:
        timed = len(known) == len(told.causes)
        these = "" if timed else "what was not timed of these, or from "
        yield (
            f"- the {'other ' if known else ''}{_ms(rest)} more come from {these}nothing that tiers knows of: the "
            "program itself, its data, or others on the machine"
        )
    if slow and recomputing:
        yield f"recomputing is no cause: it takes {_ms(recomputing)} of every iteration, as predicted"
    if told.sampled:
        yield "waits of a GPU are a sample, so one may be missing here"


def _count(step: Timed) -> int:
    """How many steps that is: what passed long ago is told together."""
    first, last = step_of(step.what)
    return last - first + 1


def _seconds(timed: Timed) -> float:
    return (timed.end - timed.begin) / 1e6


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
