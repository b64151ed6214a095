"""The timeline: what really happened when, in `timeline.json.gz`. Plain data, and the format that Perfetto reads."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections import deque
from collections.abc import Iterable
from heapq import heappop, heappush
from typing import Any, TypeAlias

from torch_tiers.migrator.model.links import LANES
from torch_tiers.migrator.telemetry.transfers import Transfer

MOST = 100_000  # events that are kept: some tens of MB, and hours of a program that moves much
HOST = "host"  # stands for a device where something happens on none
STEPS, EVENTS, ITERATIONS, WAITS = "steps", "events", "iterations", "waits"
ORDER = (STEPS, EVENTS, ITERATIONS, WAITS, *LANES)
"""Kinds of tracks, from above."""

Event: TypeAlias = tuple[int, str, str, str, float, float | None, tuple[tuple[str, object], ...]]
"""Its number, device, kind of track, name, begin and end in seconds of `time.perf_counter`, and what else to say.

An instant has no end. Plain tuples, which Python's garbage collector does not look at again and again.
"""


class Timeline:
    """What happened, the latest `most` events of it. For any thread, and without a lock.

    A signal's handler writes it down in the middle of whatever the main thread is doing, so there is none that it
    could wait for: each event is one `append`, which is atomic.
    """

    def __init__(self, most: int = MOST) -> None:
        self._events: deque[Event] = deque(maxlen=most)
        self._numbers = itertools.count(1)
        self._ended: dict[tuple[str, str], tuple[int, float]] = {}

    # ----------------------------------------------------------------------------------- recording

    def step(self, number: int, end: float) -> None:
        """An optimizer step is over, and what led to it."""
        self._until(HOST, STEPS, "step", number, end)

    def iteration(self, device: str, number: int, end: float) -> None:
        """An iteration is over on a device."""
        self._until(device, ITERATIONS, "iteration", number, end)

    def waited(self, device: str, cause: str, begin: float, end: float) -> None:
        """The compute stream of a device, or a thread of the host, waited for a lane."""
        self._add(device, WAITS, cause, begin, end)

    def copied(self, device: str, lane: str, nbytes: int, begin: float, end: float) -> None:
        """A lane has carried something out."""
        if end > begin:
            speed = round(nbytes / (end - begin) / 1e9, 3)
            self._add(device, lane, lane, begin, end, ("bytes", nbytes), ("GB/s", speed))

    def copies(self, device: str, transfers: Iterable[Transfer], since: float) -> None:
        """Take over what lanes tell; `since` is what their times count from."""
        for copy in transfers:
            self.copied(device, copy.lane, copy.nbytes, since + copy.begin, since + copy.end)

    def happened(self, what: str, **more: object) -> None:
        """Something happened, now."""
        self._add(HOST, EVENTS, what, time.perf_counter(), None, *more.items())

    def _until(self, device: str, kind: str, noun: str, number: int, end: float) -> None:
        """Add what took from the end of the one before it until `end`. The very first has no known beginning."""
        before = self._ended.get((device, kind))
        if before is not None and end <= before[1]:
            return  # on another stream, which was ahead
        self._ended[device, kind] = number, end
        if before is not None:
            first = before[0] + 1  # between them nobody may have looked: hooks rest, or a graph is being captured
            name = f"{noun} {number}" if first >= number else f"{noun}s {first} to {number}"
            self._add(device, kind, name, before[1], end)

    def _add(
        self, device: str, kind: str, name: str, begin: float, end: float | None, *more: tuple[str, object]
    ) -> None:
        self._events.append((next(self._numbers), device, kind, name, begin, end, more))

    # ------------------------------------------------------------------------------------- writing

    def to_json(self) -> str:
        """Chrome's trace-event format: times in microseconds, on the host's monotonic clock."""
        events = list(self._events)  # at once: others go on recording
        recorded = max((event[0] for event in events), default=0)
        metadata = {
            "clock": "CLOCK_MONOTONIC of the host, on which what a GPU did is placed as far as is known",
            "unix_time_at_zero": time.time() - time.perf_counter(),
            "dropped_events": recorded - len(events),
        }
        return json.dumps(
            {"traceEvents": trace_events(events, os.getpid()), "displayTimeUnit": "ms", "otherData": metadata}
        )


def trace_events(events: Iterable[Event], process: int) -> list[dict[str, Any]]:
    """The events in Chrome's trace-event format, with the names of their tracks.

    Slices of one track must not overlap there; where these do (two threads wait, two requests are under way), those
    that begin later go on a track of their own.
    """
    rows: dict[tuple[str, str], _Rows] = {}
    placed: list[tuple[tuple[str, int, int], dict[str, Any]]] = []
    for _, device, kind, name, begin, end, more in sorted(events, key=lambda event: event[4]):
        start, stop = (round(1e9 * at) for at in (begin, begin if end is None else end))
        row = rows.setdefault((device, kind), _Rows()).take(start, stop)
        lasts = {"ph": "i", "s": "t"} if end is None else {"ph": "X", "dur": (stop - start) / 1e3}
        event = {"name": name, "cat": kind, "ts": start / 1e3, "pid": process, **lasts, "args": dict(more)}
        placed.append(((device, ORDER.index(kind), row), event))
    # The host's tracks first.
    tracks = sorted({track for track, _ in placed}, key=lambda track: (track[0] != HOST, track))
    threads = {track: number for number, track in enumerate(tracks, 1)}
    named = [_metadata("process_name", process, 0, "tiers")]
    for (device, place, row), thread in threads.items():
        named.append(_metadata("thread_name", process, thread, _title(device, ORDER[place], row)))
        named.append(_metadata("thread_sort_index", process, thread, thread))
    return named + [event | {"tid": threads[track]} for track, event in placed]


class _Rows:
    """The rows of a track, each of which has one slice at a time. Slices come in the order of their beginnings."""

    def __init__(self) -> None:
        self._taken: list[tuple[int, int]] = []  # a heap: until when in nanoseconds, and which row
        self._free: list[int] = []  # a heap

    def take(self, start: int, stop: int) -> int:
        """The first row that is free from `start`, in nanoseconds; it is taken until `stop`."""
        while self._taken and self._taken[0][0] <= start:
            heappush(self._free, heappop(self._taken)[1])
        row = heappop(self._free) if self._free else len(self._taken)
        heappush(self._taken, (stop, row))
        return row


def _metadata(what: str, process: int, thread: int, value: str | int) -> dict[str, Any]:
    key = "sort_index" if isinstance(value, int) else "name"
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": {key: value}}


def _title(device: str, kind: str, row: int) -> str:
    sampled = " (sampled)" if device != HOST and kind != ITERATIONS else ""
    return f"{device} {kind}{sampled}{f', {row + 1}' if row else ''}"
