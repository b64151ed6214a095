"""The timeline: what really happened when, in `timeline.json.gz`. Plain data, written in the format of Perfetto."""

from __future__ import annotations

import itertools
import json
import os
import platform
import time
from collections import deque
from collections.abc import Iterable
from heapq import heappush, heappushpop

from torch_tiers.migrator.telemetry.trace_events import (
    EVENTS,
    GROUP,
    HOST,
    IN_USE,
    ITERATIONS,
    OFFLOADS,
    PREFETCHES,
    STEPS,
    WAITS,
    Event,
    Process,
    trace_events,
)
from torch_tiers.migrator.telemetry.transfers import Transfer

MOST = 100_000  # events that are kept: some tens of MB, and hours of a program that moves much
MOST_OF_GROUPS = 30_000  # events of groups, which come too often to be kept among the others
MOST_OF_STEPS = 30_000  # steps, and events such as a new plan: copies and waits must not push them out
SLOWEST = 32  # steps of which the events are kept for good, however long the program goes on
MOST_OF_A_STEP = 1000  # events of such a step
LATE = 16  # steps after which all of a step is known: a device tells what it did once it is through with that


class Timeline:
    """What happened, the latest `most` events of it, and those of the slowest steps. For any thread, without a lock.

    A signal's handler writes it down in the middle of whatever the main thread is doing, so there is none that it
    could wait for: each event is one `append`, which is atomic.

    Parameters
    ----------
    most, of_groups : int
        Events that are kept: those of iterations, lanes and waits, and those of groups. Of steps, and of what happens
        now and then, `MOST_OF_STEPS` are kept, if that is not more than `most`.
    rank : int or None
        Of this process in its job; None if it is one of several and nobody told it which.
    """

    def __init__(self, most: int = MOST, of_groups: int = MOST_OF_GROUPS, rank: int | None = 0) -> None:
        self._rank = rank
        self._events: deque[Event] = deque(maxlen=most)
        self._of_groups: deque[Event] = deque(maxlen=of_groups)
        self._of_steps: deque[Event] = deque(maxlen=min(most, MOST_OF_STEPS))
        self._numbers = itertools.count(1)
        self._numbers_of_steps = itertools.count(1)
        self._numbers_of_groups = itertools.count(1)
        self._groups = itertools.count(1)
        self._last: dict[str, tuple[tuple[str, int], ...]] = {}  # that was counted
        self._ended: dict[tuple[str, str], tuple[int, float]] = {}
        self._steps: deque[tuple[float, int, float]] = deque()  # the last `LATE`: seconds, number and end
        self._slowest: list[tuple[float, int, float]] = []  # a heap
        self._of_slowest: dict[int, list[Event]] = {}

    # ----------------------------------------------------------------------------------- recording

    def step(self, number: int, end: float) -> None:
        """An optimizer step is over, and what led to it."""
        before = self._ended.get((HOST, STEPS))
        self._until(HOST, STEPS, "step", number, end)
        if before is not None:
            self._steps.append((end - before[1], number, end))
        if len(self._steps) > LATE:
            self._keep_if_slow(self._steps.popleft())

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

    def offloaded(self, device: str, iteration: int, nbytes: int, begin: float, end: float) -> int:
        """The host has asked for a group's offload; return the number that the group is told by."""
        group = next(self._groups)
        self._of_group(device, OFFLOADS, "offload", iteration, group, nbytes, begin, end)
        return group

    def prefetched(self, device: str, iteration: int, group: int, nbytes: int, begin: float, end: float) -> None:
        """The host has asked for the prefetch of a group that was `offloaded`."""
        self._of_group(device, PREFETCHES, "prefetch", iteration, group, nbytes, begin, end)

    def counted(self, counter: str, at: float, *series: tuple[str, int]) -> None:
        """So many bytes of each series are in use from then on."""
        self._last[counter] = series
        self._add(HOST, IN_USE, counter, at, None, *series)

    def counted_at_group(self, counter: str, at: float, *series: tuple[str, int]) -> None:
        """The same, where a group left or came: that is forgotten earlier."""
        if self._last.get(counter) != series:
            self._last[counter] = series
            self._of_groups.append((next(self._numbers_of_groups), HOST, IN_USE, counter, at, None, series))

    def _of_group(
        self, device: str, kind: str, name: str, iteration: int, group: int, nbytes: int, begin: float, end: float
    ) -> None:
        more = (("bytes", nbytes), ("iteration", iteration), (GROUP, group))
        self._of_groups.append((next(self._numbers_of_groups), device, kind, name, begin, end, more))

    def _keep_if_slow(self, step: tuple[float, int, float]) -> None:
        """Keep the events of a step that is among the slowest so far."""
        if len(self._slowest) < SLOWEST:
            heappush(self._slowest, step)
        elif (faster := heappushpop(self._slowest, step)) is step:
            return
        else:
            self._of_slowest.pop(faster[1], None)
        seconds, number, end = step
        events = [*self._of_steps, *self._events]  # at once: others go on recording
        within = (
            each for each in events if each[4] < end and (each[4] if each[5] is None else each[5]) > end - seconds
        )
        self._of_slowest[number] = list(itertools.islice(within, MOST_OF_A_STEP))

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
        if kind in (STEPS, EVENTS):
            self._of_steps.append((next(self._numbers_of_steps), device, kind, name, begin, end, more))
        else:
            self._events.append((next(self._numbers), device, kind, name, begin, end, more))

    # ------------------------------------------------------------------------------------- writing

    def to_json(self) -> str:
        """Chrome's trace-event format: times in microseconds, on the host's monotonic clock."""
        events, of_steps, of_groups = list(self._events), list(self._of_steps), list(self._of_groups)  # at once
        kept = {id(each): each for step in list(self._of_slowest.values()) for each in step}
        for each in itertools.chain(events, of_steps):
            kept.pop(id(each), None)
        metadata = {
            "clock": "CLOCK_MONOTONIC of the host, on which what a GPU did is placed as far as is known",
            "unix_time_at_zero": time.time() - time.perf_counter(),
            "dropped_events": _dropped(events) + _dropped(of_steps) - len(kept),
            "dropped_events_of_groups": _dropped(of_groups),
        }
        shown = trace_events([*events, *of_steps, *of_groups, *kept.values()], self._process())
        return json.dumps({"traceEvents": shown, "displayTimeUnit": "ms", "otherData": metadata})

    def _process(self) -> Process:
        """A rank has its own number: process ids may be the same on two nodes."""
        pid, rank = os.getpid(), self._rank
        label = f"pid {pid} on {platform.node()}"
        if rank is None:
            return Process(pid, f"process {pid}", label)
        return Process(rank + 1, f"rank {rank}", label, place=rank)


def _dropped(events: list[Event]) -> int:
    return max((event[0] for event in events), default=0) - len(events)
