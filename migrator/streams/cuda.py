"""Compute and lanes on a GPU: CUDA streams, asked of the driver by the native library.

The host waits only as a lane closes, in `mark_times`, and for events that a thread has yet to ask a lane for.
"""

from __future__ import annotations

import functools
import itertools
import threading
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import cast

import torch

from torch_tiers.allocator.native.copy import lane
from torch_tiers.migrator.model.timing import IterationTime
from torch_tiers.migrator.streams import TIMED, TIMED_EVERY, Event, Gap, Memory, OperatorClock, Stream, peaks
from torch_tiers.migrator.streams.hold import LONGEST
from torch_tiers.migrator.streams.iteration_timer import IterationTimer
from torch_tiers.migrator.streams.meter import CudaMeter, MarkTimes
from torch_tiers.migrator.streams.pieces import Leaving, Piece, at_full_speed
from torch_tiers.migrator.streams.promised import PromisedEvent
from torch_tiers.migrator.telemetry.counters import Counters
from torch_tiers.migrator.telemetry.transfers import Transfer

MARKS = 64  # events by which it is measured what one takes
BETWEEN = 2e-5  # seconds of a kernel that is longer than the time in which a stream passes no second event
CLOCK = 1.5e9  # cycles a second of a GPU whose clock PyTorch does not tell: somewhat less than today's have


class CudaCompute:
    """The current stream of a CUDA device, asked for at each use: a program may change it at any time."""

    counts = True

    def __init__(
        self, device: torch.device, counters: Counters, library: lane.Library, memory: Memory | None = None
    ) -> None:
        self.device = device
        self._library = library
        # Our own allocator, where it is there, knows by itself what to give back; see `PageAllocator.expect_new_plans`.
        memory = memory or Memory(peaks.PeaksOfPyTorch(device), renew=torch.cuda.empty_cache)
        self._peaks, self.untracked, self.tidy, self.renew = memory
        self.take_peak = self._peaks.take_peak
        self.delayed = self._peaks.delayed
        # PyTorch's own, without a frame of ours around them: both are asked for with every tensor that moves. What
        # `torch.cuda.current_stream` does with the first takes seven microseconds.
        self.stream: Callable[[], tuple[int, int, int]] = functools.partial(
            torch._C._cuda_getCurrentStream, device.index
        )
        self.capturing: Callable[[], bool] = torch._C._cuda_isCurrentStreamCapturing
        self._counters = counters
        self._timer = IterationTimer(str(device), counters)
        self._before = 0  # the most in use since the last iteration ended, as far as it counts
        self.waited: list[Gap] | None = None  # what a meter leaves out
        self.operators: OperatorClock | None = None
        _, self._retries = self._peaks.restart()

    def empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def mark(self, stream: Stream) -> lane.TimedEvent:
        return self._library.record(self.device.index, wrapped(stream).cuda_stream)

    @functools.cached_property
    def mark_times(self) -> MarkTimes:
        """What events of ours take a stream, by kernels with and without one behind each. Waits for these."""
        _, least = self._kernel_times(0.0)
        plain, marked = self._kernel_times(BETWEEN)
        return MarkTimes(max(0.0, marked - plain), least)

    def _kernel_times(self, seconds: float) -> tuple[float, float]:
        """Seconds of a kernel that does nothing for so long, alone and with an event behind it.

        0 where the device was not held up for long enough to have all that before it.
        """
        stream = self.stream()
        self.hold_up(LONGEST)
        with torch.cuda.device(self.device):
            points = [self.mark(stream)]
            for with_marks in (False, True):
                for _ in range(MARKS):
                    torch.cuda._sleep(max(1, int(seconds * self._rate)))
                    if with_marks:
                        self.mark(stream)
                points.append(self.mark(stream))
        in_time = not points[0].query()
        points[-1].synchronize()
        plain, marked = (start.elapsed_time(end) / 1e3 / MARKS for start, end in itertools.pairwise(points))
        return (plain, marked) if in_time else (0.0, 0.0)

    def follow(self, stream: Stream, event: Event) -> Gap | None:
        """Let `stream` go on only after `event`; when it got there and when it went on, or None if that was passed."""
        assert isinstance(event, lane.Event)
        return self._library.follow(self.device.index, wrapped(stream).cuda_stream, event)

    def hold(self, stream: Stream, event: Event) -> None:
        """Let `stream` go on only after `event`."""
        assert isinstance(event, lane.Event)
        self._library.wait(self.device.index, wrapped(stream).cuda_stream, event)

    def time_waits(self, iterations: int) -> None:
        self._timer.stand_for = iterations

    def wait(self, event: Event, cause: str, stream: Stream) -> None:
        timed = self._timer.stand_for or self.waited is not None or self.capturing()
        reached: lane.TimedEvent | None = None
        if isinstance(event, PromisedEvent):
            if timed and not event.is_there:
                reached = self.mark(stream)  # before the host waits, while which the stream runs dry
            there = event.event()
            if there is None:
                return
            event = there
        if not timed:
            # To wait costs a stream 0.1 us. The two events that tell for how long cost 6.4, on an H200.
            self.hold(stream, event)
            return
        # Told by the compute stream's own events: those of the lanes keep no time (`lane.cpp` says why).
        if reached is None:
            gap = self.follow(stream, event)
        else:
            self.hold(stream, event)
            gap = reached, self.mark(stream)
        if gap is None:
            return
        self._timer.waited(cause, gap)
        if self.waited is not None:
            self.waited.append(gap)

    def outlast(self, event: Event, stream: Stream) -> None:
        # What the lane reads from now on is nobody's any more, so it might be overwritten; but not unmapped, as the
        # allocator does with memory that is free (expandable segments) once that memory's own stream is done.
        self.wait(event, "d2h", stream)

    def hand_over(self, buffer: torch.Tensor) -> None:
        buffer.record_stream(torch.cuda.current_stream(self.device))

    def settle(self) -> IterationTime | None:
        if self.capturing():
            self._timer.iteration_passed()
            return None
        return self._timer.iteration_over(lambda: self.mark(self.stream()))

    def end_resting_iteration(self) -> None:
        self._timer.stand_for = 1
        if self._timer.has_waits:
            self.settle()

    def idle(self) -> bool:
        return self._timer.idle()

    def when(self, event: Event, recorded: float) -> float:
        return self._timer.when(cast("lane.TimedEvent", event), recorded)

    def close(self) -> None:
        self._timer.close(capturing=self.capturing())

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device)

    def hold_up(self, seconds: float) -> None:
        """Have the present stream do nothing for so long, while the host goes on; not within a capture."""
        if self.capturing():
            return
        with torch.cuda.device(self.device):
            torch.cuda._sleep(int(seconds * self._rate))

    @functools.cached_property
    def _rate(self) -> float:
        """Cycles a second."""
        properties = torch.cuda.get_device_properties(self.device)
        return float(getattr(properties, "clock_rate", 0) * 1e3 or CLOCK)  # which is in kHz, where PyTorch tells it

    def meter(self, *, held: bool = False) -> CudaMeter:
        if _others_wait_for_this():
            return CudaMeter(self, operators=self.operators)
        return CudaMeter(self, held=held)

    def peak(self, resident: int) -> int:
        peak, self._before = max(self._before, self._peaks.restart()[0]), 0
        return peak

    def pass_by(self, *, counts: bool) -> None:
        peak, retries = self._peaks.restart()
        if counts:
            self._before = max(self._before, peak)
        else:
            self._flushed(retries)  # what did so was no iteration either

    def pressed(self) -> bool:
        return self._flushed(self._peaks.retries())

    def _flushed(self, retries: int) -> bool:
        """Whether the allocator has flushed its cache since this was last asked."""
        before, self._retries = self._retries, retries
        new = retries - before if retries >= before else retries  # fewer: the program has PyTorch count anew
        self._counters.flushes += new
        if new and self._counters.timeline is not None:
            self._counters.timeline.happened("hbm was full", device=str(self.device))
        return new > 0

    def reserved(self) -> int:
        return torch.cuda.max_memory_reserved(self.device)


def _others_wait_for_this() -> bool:
    """Whether this is one of several ranks: a collective of the others takes as long as the slowest of all."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


@functools.cache
def wrapped(stream: Stream) -> torch.cuda.Stream:
    """PyTorch's object for a stream."""
    number, device, kind = cast("tuple[int, int, int]", stream)
    return torch.cuda.Stream(stream_id=number, device_index=device, device_type=kind)


class CudaLane:
    """A lane of the native library; a copy takes few calls of the driver, and its pieces are not gathered first."""

    def __init__(self, device: torch.device, name: str, counters: Counters, library: lane.Library) -> None:
        self._name = name
        self._counters = counters
        self._library = library
        self._lane = library.open(device.index)
        # Several threads may train on the device, and a lane takes one copy at a time.
        self._submitting = threading.RLock()
        self._timed: deque[tuple[int, lane.TimedEvent, lane.TimedEvent]] = deque()
        self._asking = threading.Lock()
        self._untimed = TIMED_EVERY  # bytes since a copy was timed

    def copy(self, pieces: Iterable[Piece], after: Sequence[Event], behind: Stream = None) -> lane.Event:
        if isinstance(pieces, Leaving):  # in one call
            total, spans = pieces.nbytes, array("Q", pieces.spans(pieces.members, pieces.block.data_ptr()))
        else:
            pieces = tuple(pieces)
            total, spans = sum(piece.nbytes for piece in pieces), array("Q")
            for target, at, source, start, nbytes in pieces:
                spans.extend((target.data_ptr() + at, source.data_ptr() + start, nbytes))
        stream = None if behind is None else wrapped(behind).cuda_stream
        submission = (self._lane, spans, cast("Sequence[lane.Event]", after), stream)
        with self._submitting:
            done: lane.Event
            if self._is_timed(pieces, total):
                begin, done = self._library.timed_copy(*submission)
                self._timed.append((total, begin, done))
            else:
                done = self._library.copy(*submission)
        self._counters.moved[self._name] += total
        return done

    def over(self, since: Event) -> list[Transfer]:
        start = cast("lane.TimedEvent", since)
        found: list[Transfer] = []
        with self._asking:  # a query lets other threads go on, and each ends iterations of its own
            while self._timed and self._timed[0][2].query():
                nbytes, begin, done = self._timed.popleft()
                times = (start.elapsed_time(event) / 1e3 for event in (begin, done))
                found.append(Transfer(self._name, nbytes, *times))
        return found

    def _is_timed(self, pieces: Iterable[Piece], nbytes: int) -> bool:
        """Whether to time a copy: now and then, as it holds the lane up, and where its time is the link's."""
        self._untimed += nbytes
        if self._untimed < TIMED_EVERY or len(self._timed) >= TIMED or not at_full_speed(pieces):
            return False
        self._untimed = 0
        return True

    def close(self) -> None:
        with self._submitting:
            self._lane.synchronize()
