"""The rules of Chrome's trace-event format, as far as Perfetto needs them to draw what is meant."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

REQUIRED = {
    "X": {"name", "cat", "ts", "dur", "pid", "tid", "args"},
    "i": {"name", "cat", "ts", "s", "pid", "tid"},
    "C": {"name", "ts", "pid", "args"},
    "s": {"name", "cat", "id", "ts", "pid", "tid"},
    "f": {"name", "cat", "id", "ts", "bp", "pid", "tid"},
    "M": {"name", "pid", "tid", "args"},
}
"""Fields by phase."""

METADATA = {
    "process_name": ("name", str),
    "process_labels": ("labels", str),
    "process_sort_index": ("sort_index", int),
    "thread_name": ("name", str),
    "thread_sort_index": ("sort_index", int),
}
LARGEST = 2**53  # number that a browser reads exactly

Event = dict[str, Any]
Track = tuple[int, int]


def broken(whole: Any) -> list[str]:
    """What is against the rules in a timeline that was read from JSON, one line each; none: it is as it should be."""
    events = whole.get("traceEvents") if isinstance(whole, dict) else None
    if not isinstance(events, list):
        return ["traceEvents is no list"]
    said = [f"displayTimeUnit is {unit!r}" for unit in [whole.get("displayTimeUnit", "ms")] if unit not in ("ms", "ns")]
    said += [f"{problem}: {event}" for event in events for problem in _of_event(event)]
    if said:
        return said  # what follows takes the fields for granted
    return [*_of_names(events), *_of_slices(events), *_of_flows(events), *_of_counters(events)]


def _of_event(event: Any) -> Iterator[str]:
    if not isinstance(event, dict) or event.get("ph") not in REQUIRED:
        yield "no event of a phase that is known"
        return
    if missing := REQUIRED[event["ph"]] - event.keys():
        yield f"{', '.join(sorted(missing))} missing"
        return
    if not isinstance(event["name"], str) or not event["name"]:
        yield "no name"
    for field in ("ts", "dur"):
        if field in event and not (_is_number(event[field]) and 0 <= event[field] < LARGEST):
            yield f"{field} is no time"
    if not (_is_whole(event["pid"]) and 0 < event["pid"] < 2**32):  # Perfetto takes 0 for the idle process
        yield "pid is no number of a process"
    if "tid" in event and not (_is_whole(event["tid"]) and 0 <= event["tid"] < 2**32):
        yield "tid is no number of a thread"
    yield from _of_phase(event)


def _of_phase(event: Event) -> Iterator[str]:
    phase, args = event["ph"], event.get("args", {})
    if not isinstance(args, dict):
        yield "args is no object"
    elif phase == "C" and (not args or not all(map(_is_number, args.values()))):
        yield "a counter's series are no numbers"
    elif phase == "M":
        key, kind = METADATA.get(event["name"], ("", object))
        if set(args) != {key} or not isinstance(args[key], kind):
            yield "metadata that nobody reads"
    if phase in "sf" and not (_is_whole(event["id"]) and 0 <= event["id"] < LARGEST):
        yield "id is no number of a flow"
    if phase == "f" and event["bp"] != "e":
        yield "a flow ends at the next slice, not at the one around it"
    if phase == "i" and event["s"] not in ("g", "p", "t"):
        yield "s is no scope"


def _of_names(events: list[Event]) -> Iterator[str]:
    """Each process and each track is named, once."""
    named: dict[tuple[str, int, int], int] = defaultdict(int)
    for event in events:
        if event["ph"] == "M":
            named[event["name"], event["pid"], event["tid"]] += 1
    yield from (f"told {times} times: {what}" for what, times in named.items() if times > 1)
    processes = {pid for what, pid, _ in named if what == "process_name"}
    threads = {(pid, tid) for what, pid, tid in named if what == "thread_name"}
    for pid, tid in {(event["pid"], event.get("tid")) for event in events if event["ph"] != "M"}:
        if pid not in processes:
            yield f"process {pid} has no name"
        if tid is not None and (pid, tid) not in threads:
            yield f"thread {tid} of process {pid} has no name"


def _of_slices(events: list[Event]) -> Iterator[str]:
    """Of one thread each lies within another, or beside it."""
    for track, slices in _by_track(events).items():
        around: list[int] = []  # ends of the slices that the present one lies in
        for start, minus_end in sorted((start, -end) for start, end in slices):
            while around and around[-1] <= start:
                around.pop()
            if around and -minus_end > around[-1]:
                yield f"a slice of {track} that begins at {start} ns ends after the one around it"
            around.append(-minus_end)


def _of_flows(events: list[Event]) -> Iterator[str]:
    """Each begins once and ends once, not before it has begun, and does so inside slices."""
    slices, ends = _by_track(events), defaultdict(list)
    for event in events:
        if event["ph"] in "sf":
            ends[event["cat"], event["name"], event["id"]].append(event)
            at = _ns(event["ts"])
            if not any(start <= at <= end for start, end in slices.get((event["pid"], event["tid"]), ())):
                yield f"outside of any slice: {event}"
    for flow, of_flow in ends.items():
        if sorted(event["ph"] for event in of_flow) != ["f", "s"]:
            yield f"flow {flow} does not begin once and end once"
            continue
        end, begin = sorted(of_flow, key=lambda event: event["ph"])
        if end["ts"] < begin["ts"]:
            yield f"flow {flow} ends before it begins"


def _of_counters(events: list[Event]) -> Iterator[str]:
    """What a series has once, it has from then on: one that is left out may be drawn as 0."""
    series: dict[tuple[int, str], set[str]] = defaultdict(set)
    for event in sorted((event for event in events if event["ph"] == "C"), key=lambda event: event["ts"]):
        before = series[event["pid"], event["name"]]
        if lost := before - event["args"].keys():
            yield f"{', '.join(sorted(lost))} is left out: {event}"
        before.update(event["args"])


def _by_track(events: list[Event]) -> dict[Track, list[tuple[int, int]]]:
    """The beginnings and ends of slices in nanoseconds, in which the format's fractions are exact."""
    slices: dict[Track, list[tuple[int, int]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            slices[event["pid"], event["tid"]].append((_ns(event["ts"]), _ns(event["ts"]) + _ns(event["dur"])))
    return slices


def _ns(micros: float) -> int:
    return round(1e3 * micros)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
