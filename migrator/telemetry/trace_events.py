"""Chrome's trace-event format, which Perfetto reads: slices, instants, counters, arrows, and the names of tracks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import heappop, heappush
from typing import Any, NamedTuple, TypeAlias

from torch_tiers.migrator.model.links import LANES

HOST = "host"  # stands for a device where something happens on none
STEPS, EVENTS, ITERATIONS, WAITS = "steps", "events", "iterations", "waits"
OFFLOADS, PREFETCHES = "offloads", "prefetches"
ORDER = (STEPS, EVENTS, ITERATIONS, WAITS, OFFLOADS, PREFETCHES, *LANES)
"""Kinds of tracks, from above."""

IN_USE = "in use"  # the kind of what is counted, which has no such track
GROUP = "group"  # what tells the group of an offload or a prefetch: a number that no group of another iteration has
SAMPLED = (WAITS, *LANES)  # kinds of which a device tells some alone

Event: TypeAlias = tuple[int, str, str, str, float, float | None, tuple[tuple[str, object], ...]]
"""Its number, device, kind of track, name, begin and end in seconds of `time.perf_counter`, and what else to say.

An instant has no end, nor has a count, which says its series. Plain tuples, which Python's garbage collector does not
look at again and again.
"""


class Process(NamedTuple):
    """The process of a file's events.

    Attributes
    ----------
    number : int
        Tells it from those of other files that are opened together. Not 0, which Perfetto takes for the idle process.
    name, label : str
        What it is called, and what is said beside that.
    place : int
        Processes with a lower one are drawn above it.
    """

    number: int
    name: str
    label: str = ""
    place: int = 0


def trace_events(events: Iterable[Event], process: Process) -> list[dict[str, Any]]:
    """The events in Chrome's trace-event format, with the names of their tracks. Times are microseconds.

    Slices of one track must not overlap there; where these do (two threads wait, two requests are under way), those
    that begin later go on a track of their own.
    """
    rows: dict[tuple[str, str], _Rows] = {}
    placed: list[tuple[tuple[str, int, int], dict[str, Any]]] = []
    counts = []
    for event in sorted(events, key=lambda event: event[4]):
        _, device, kind, name, begin, end, more = event
        if kind == IN_USE:
            counts.append(event)
            continue
        start, stop = (round(1e9 * at) for at in (begin, begin if end is None else end))
        row = rows.setdefault((device, kind), _Rows()).take(start, stop)
        lasts = {"ph": "i", "s": "t"} if end is None else {"ph": "X", "dur": (stop - start) / 1e3}
        shown = {"name": name, "cat": kind, "ts": start / 1e3, "pid": process.number, **lasts, "args": dict(more)}
        placed.append(((device, ORDER.index(kind), row), shown))
    # The host's tracks first.
    tracks = sorted({track for track, _ in placed}, key=lambda track: (track[0] != HOST, track))
    threads = {track: number for number, track in enumerate(tracks, 1)}
    slices = [event | {"tid": threads[track]} for track, event in placed]
    return [*_names(process, threads), *slices, *_arrows(slices, process.number), *_counters(counts, process.number)]


def _names(process: Process, threads: dict[tuple[str, int, int], int]) -> Iterator[dict[str, Any]]:
    yield _metadata("process_name", process.number, 0, name=process.name)
    yield _metadata("process_sort_index", process.number, 0, sort_index=process.place)
    if process.label:
        yield _metadata("process_labels", process.number, 0, labels=process.label)
    for (device, place, row), thread in threads.items():
        yield _metadata("thread_name", process.number, thread, name=_title(device, ORDER[place], row))
        yield _metadata("thread_sort_index", process.number, thread, sort_index=thread)


def _arrows(slices: Iterable[dict[str, Any]], process: int) -> Iterator[dict[str, Any]]:
    """An arrow from each offload to the first prefetch of its group, where both are there."""
    offloads: dict[object, dict[str, Any]] = {}
    for event in slices:  # in the order of their beginnings
        if event["cat"] == OFFLOADS:
            offloads[event["args"][GROUP]] = event
        elif event["cat"] == PREFETCHES and (begun := offloads.pop(event["args"][GROUP], None)) is not None:
            # Those of several files may be read as one: a number means the same group in all of them.
            number = (process << 32) + event["args"][GROUP]
            for phase, at in (({"ph": "s"}, begun), ({"ph": "f", "bp": "e"}, event)):
                where = {"ts": round(at["ts"] + at["dur"] / 2, 3), "pid": process, "tid": at["tid"]}
                yield {"name": GROUP, "cat": GROUP, "id": number, **phase, **where}


def _counters(counts: Iterable[Event], process: int) -> Iterator[dict[str, Any]]:
    """Counters with all their series, as what one lacks may be drawn as 0; none that says what the last did."""
    last: dict[str, dict[str, object]] = {}
    for _, _, _, name, at, _, series in counts:
        before = last.get(name, {})
        if (now := before | dict(series)) != before:
            last[name] = now
            yield {"name": name, "cat": IN_USE, "ph": "C", "ts": round(1e9 * at) / 1e3, "pid": process, "args": now}


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


def _metadata(what: str, process: int, thread: int, **value: str | int) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": value}


def _title(device: str, kind: str, row: int) -> str:
    sampled = " (sampled)" if device != HOST and kind in SAMPLED else ""
    return f"{device} {kind}{sampled}{f', {row + 1}' if row else ''}"
