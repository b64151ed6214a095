"""Meters: measure device time, host time and HBM at each position of an iteration that is recorded.

What the lanes and our own trials add to the iteration is subtracted: waits of the compute stream for a lane, and all
*untracked* work. On a GPU there are two clocks: events of the device, and the host's own time between our hooks. Where
the device waits for the host, events show the host's pace. So the device can be *held* back, again and again, so that
the host is always ahead of it. If other ranks would wait for that, and have this one wait for them, operators are timed
one by one: what the device does between two of them is not the program's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import accumulate, pairwise
from typing import NamedTuple, Protocol

from torch_tiers.migrator.model.clocks import Clocks
from torch_tiers.migrator.streams import Gap, Measures, OperatorClock, OperatorTimes, TimedEvent
from torch_tiers.migrator.streams.gaps import without_gaps
from torch_tiers.migrator.streams.hold import Hold
from torch_tiers.migrator.streams.host_clock import HostClock

NEAR = 32  # ticks: when the device has passed the last but so many, it is held back
LONG = 5e-4  # seconds: our own work that takes longer outlasts a short hold, and the device waits for it


class MarkTimes(NamedTuple):
    """What an event takes a stream: `seconds` behind a kernel, and at `least` so long after the event before it.

    On an H200 these are 3 and 11 us. Where several tensors are saved at once, nothing but events is in between.
    """

    seconds: float = 0.0
    least: float = 0.0

    def without(self, busy: float, marks: int) -> float:
        """Return what a stretch with so many events took without them; nothing if it took no longer than they do."""
        return 0.0 if busy <= marks * self.least else busy - marks * self.seconds


class Host(Protocol):
    """What is asked of a program on the CPU."""

    static: int

    def stalled(self) -> float:
        """Seconds that it has waited for lanes."""


class Device(Protocol):
    """What is asked of a program on a GPU; see `migrator.streams.cuda.CudaCompute`."""

    stream: Callable[[], tuple[int, int, int]]
    capturing: Callable[[], bool]
    untracked: Callable[[], AbstractContextManager[None]]
    waited: list[Gap] | None

    @property
    def mark_times(self) -> MarkTimes: ...
    @property
    def take_peak(self) -> Callable[..., int]: ...
    @property
    def delayed(self) -> Callable[[], float]: ...
    def mark(self, stream: tuple[int, int, int]) -> TimedEvent: ...
    def hold_up(self, seconds: float) -> None: ...


class HostMeter:
    """The host's clock, which stands still while hooks work, and the compute's count of bytes.

    While an iteration is recorded hooks take many times as long as under a plan.
    """

    def __init__(self, compute: Host) -> None:
        self._compute = compute
        self._untracked = 0.0
        self._own = 0.0  # seconds of the program so far
        self._since: float | None = self.mark()  # when it went on; None while it is we who work
        self._times: list[float] = []
        self._others: list[int] = []

    def mark(self) -> float:
        """A point in the program's time, in seconds."""
        return time.perf_counter() - self._compute.stalled() - self._untracked

    def seconds(self, start: float, end: float) -> float:
        """Seconds from one point to another."""
        return end - start

    def tick(self, resident: int) -> None:
        """A position is reached; `resident` bytes of saved storages have been in HBM since the one before."""
        self.arrive()
        self._times.append(self._own)
        self._others.append(self._compute.static)
        self.depart()  # at the latest: who departs once more has the program go on from then

    def arrive(self, *, outside: bool = False) -> None:
        """Stop the program's clock, until `depart`: a hook has begun."""
        if self._since is not None:
            self._own += self.mark() - self._since
            self._since = None

    def depart(self) -> None:
        """Let the program's clock go on."""
        self._since = self.mark()

    def part(self, resident: int) -> None:
        """Nothing here measures memory."""

    def resume(self, *, brought: bool = False) -> None:
        """Our own work at a position is over."""
        self.depart()

    def abandon(self) -> None:
        """Nothing is under way."""

    @contextmanager
    def untracked(self) -> Iterator[None]:
        """Do work in this scope that is not measured as the program's."""
        start = self.mark()
        try:
            yield
        finally:
            self._untracked += self.mark() - start

    def most(self) -> int:
        """Nothing here measures memory."""
        return 0

    def others_so_far(self, resident: int) -> int:
        """Nothing here measures memory."""
        return 0

    def finish(self, resident: int, held: Sequence[int]) -> Measures:
        """The iteration is over. To be called once."""
        self.arrive()
        return Measures(tuple(self._times), self._own, (*self._others, self._compute.static))


class CudaMeter:
    """Events on the compute stream, the host's clock, and the peaks of the allocator.

    Parameters
    ----------
    held : bool
        Whether the device is held back whenever it has nearly caught up with the host.
    operators : OperatorClock, optional
        Times operators one by one.
    """

    def __init__(self, compute: Device, *, held: bool = False, operators: OperatorClock | None = None) -> None:
        self._compute = compute
        self._operators: OperatorTimes | None = None
        if operators is not None:
            stream, device, _ = compute.stream()
            self._operators = operators.begin(device, stream)
        self._hold = Hold(compute, self.mark) if held else None
        if self._hold is not None:
            self._hold.begin()  # before the iteration begins, so that it is no part of it
        self._begin = self.mark()
        self._ticks: list[TimedEvent] = []
        self._marked: list[int] = []  # in each stretch: events of ours between the program's kernels
        self._marks = 0  # in the present one
        self._host = HostClock(self._begin, compute.delayed)
        self._others: list[tuple[int, int]] = []  # of a stretch: the most in its parts, and after the last of them
        self._left_out: list[tuple[TimedEvent, TimedEvent]] = []  # what is not the program's
        self._work: tuple[TimedEvent, float] | None = self._begin, time.perf_counter()  # ours, under way since then
        self._highest = 0  # bytes in use, since the last tick or part
        self._parted = 0  # the most that were not saved, of the parts since the last tick
        compute.waited = self._left_out
        compute.take_peak()

    def mark(self) -> TimedEvent:
        """A point of the present stream."""
        return self._compute.mark(self._compute.stream())

    def seconds(self, start: TimedEvent, end: TimedEvent) -> float:
        """Seconds from one point to another; both must have been passed."""
        return float(start.elapsed_time(end)) / 1e3

    def tick(self, resident: int) -> None:
        """A position is reached; `resident` bytes of saved storages have been in HBM since the one before."""
        self._host.arrive()
        # Into a graph that is being captured no event of ours may go.
        capturing = self._compute.capturing()
        tick = self._ticks[-1] if capturing and self._ticks else self.mark()
        self._work_over(tick)
        self._ticks.append(tick)
        self._stretch_marked()
        self._others.append(self._stretch(resident))
        if self._operators is not None:
            self._operators.tick(self._compute.stream()[0])
        if self._hold is not None and not capturing and self._hold.is_due(self._ticks[-NEAR:][0]):
            gap = self._hold.begin()
            self._left_out.append(gap)
            tick = gap[1]
        self._host.stretch_over(tick)
        self._host.depart()  # at the latest: who departs once more has the program go on from then
        self._work = None if capturing else (tick, time.perf_counter())

    def arrive(self, *, outside: bool = False) -> None:
        """Stop counting host time as the program's, until `depart`: a hook has begun.

        One `outside` of positions, such as a module's call, marks the stream: no tick does so for it. What the device
        waits for such work is left out.
        """
        self._host.arrive()
        self._work = None
        if outside and not self._compute.capturing():
            self._work = (self.mark(), time.perf_counter())
            self._marks += 1

    def depart(self) -> None:
        """Count host time as the program's again."""
        self._work_over()
        self._host.depart()

    def _work_over(self, at: TimedEvent | None = None) -> None:
        """End our own work, at the event `at` or now. If it took long, leave out what the device did since it began.

        The program has given the stream nothing meanwhile.
        """
        work, self._work = self._work, None
        if work is not None and time.perf_counter() - work[1] > LONG and not self._compute.capturing():
            self._left_out.append((work[0], self.mark() if at is None else at))

    def _stretch_marked(self) -> None:
        """A stretch ends with an event, for which the device waits as it does for those within it."""
        self._marked.append(self._marks + 1)
        self._marks = 0

    def part(self, resident: int) -> None:
        """In the middle of a stretch saved storages were released; `resident` bytes had been in HBM until then.

        Else they would count as others' for as long as the stretch lasts, though nobody could use them.
        """
        self._parted = max(self._parted, self._without(resident))

    def _without(self, resident: int) -> int:
        highest, self._highest = max(self._highest, self._compute.take_peak(with_present=True)), 0
        return highest - resident

    def _stretch(self, resident: int) -> tuple[int, int]:
        parted, self._parted = self._parted, 0
        return parted, self._without(resident)

    def resume(self, *, brought: bool = False) -> None:
        """Our own work at a position is over: what it did to memory belongs to neither stretch beside it.

        What lies there as a stretch begins counted for the one before. It counts once more where something may be
        `brought` back beside it, and not where something was saved: what was saved and released would count, too, for
        as long as the operation that is saving it has it in its hands, and so would all that the loss's function had
        until it returned.
        """
        self._highest = self._parted = 0
        self._compute.take_peak(with_present=brought)
        self.depart()

    def abandon(self) -> None:
        """Nobody wants to know what the iteration takes: waits are left out of nothing any more."""
        self._compute.waited = None
        self._drop_operators()

    def _drop_operators(self) -> None:
        operators, self._operators = self._operators, None
        if operators is not None:
            operators.drop()

    @contextmanager
    def untracked(self) -> Iterator[None]:
        """Do work in this scope that is not measured as the program's."""
        self._host.arrive()
        self._highest = max(self._highest, self._compute.take_peak())
        start = self.mark()
        try:
            with self._compute.untracked():
                yield
        finally:
            self._left_out.append((start, self.mark()))
            self._compute.take_peak()
            self._host.depart()

    def most(self) -> int:
        """The most bytes in use since this was last called, in an untracked scope."""
        return self._compute.take_peak()

    def others_so_far(self, resident: int) -> int:
        """Return the most bytes in use so far without those of saved storages, of which `resident` are in HBM now."""
        self._highest = max(self._highest, self.most())
        now = self.most() - resident  # nothing lies between
        return max([now, *map(max, self._others)]) if self._others else 0

    def finish(self, resident: int, held: Sequence[int]) -> Measures:
        """The iteration is over; waits until the device has passed its end. To be called once.

        `held` says for every stretch how many bytes of saved storages the program held that are not `resident`, less
        those that are, though they were used for the last time.
        Within the capture of a graph nothing is known: 0 seconds.
        """
        self._compute.waited = None
        self._host.arrive()
        if self._compute.capturing():
            self._drop_operators()
            return Measures((), 0.0, ())  # nobody may wait for the device now
        stretches = (*self._others, self._stretch(resident))
        others = tuple(
            # What left in the course of a stretch was `resident` in the parts of it before.
            max(0, parted - min(before, theirs), last - theirs)
            for (parted, last), before, theirs in zip(stretches, (0, *held[:-1]), held, strict=True)
        )
        end = self.mark()
        end.synchronize()
        now = time.perf_counter()
        self._stretch_marked()
        self._host.stretch_over(end)
        gaps = []
        for start, over in self._left_out:
            over.synchronize()  # another stream's may lie behind the end
            gaps.append((self.seconds(self._begin, start), self.seconds(self._begin, over)))
        *times, seconds = without_gaps(gaps, [self.seconds(self._begin, tick) for tick in (*self._ticks, end)])

        def when(event: TimedEvent) -> float:
            return now - self.seconds(event, end)

        device = tuple(
            self._compute.mark_times.without(max(0.0, after - before), marks)
            for (before, after), marks in zip(pairwise((0.0, *times, seconds)), self._marked, strict=True)
        )
        device = self._host.busy(device, when)
        timed = [] if self._operators is None else self._operators.end()
        if any(timed) and len(timed) == len(device):  # else none came by
            device = tuple(map(min, device, timed))
        *times, seconds = accumulate(device)
        host, joins = self._host.clocks(device, when, (*self._ticks, end))
        return Measures(tuple(times), seconds, others, Clocks(device, host, joins))
