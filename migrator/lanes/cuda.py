"""Compute and lanes on a GPU: CUDA streams. Nothing here blocks the host."""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import torch

from torch_tiers.allocator.sizes import PAGE, MiB, round_up
from torch_tiers.migrator.lanes import (
    FULL_SPEED,
    SLOT,
    TIMED,
    TIMED_EVERY,
    Event,
    Memory,
    OperatorClock,
    Piece,
    Stream,
    at_full_speed,
    flat,
    peaks,
)
from torch_tiers.migrator.lanes.laps import Gap, Laps, TimedEvent
from torch_tiers.migrator.lanes.meter import CudaMeter
from torch_tiers.migrator.lanes.promised import PromisedEvent
from torch_tiers.migrator.telemetry.counters import Counters
from torch_tiers.migrator.telemetry.transfers import Transfer
from torch_tiers.migrator.timing import Lap

STAGING = 16 * MiB  # gathered bytes per DMA: the link's full speed
CLOCK = 1.5e9  # cycles a second of a GPU whose clock PyTorch does not tell: somewhat less than today's have


class CudaCompute:
    """The current stream of a CUDA device, asked for at each use: a program may change it at any time."""

    counts = True

    def __init__(self, device: torch.device, counters: Counters, memory: Memory | None = None) -> None:
        self.device = device
        # Our own allocator, where it is there, knows by itself what to give back; see `PageAllocator.expect_news`.
        memory = memory or Memory(peaks.PeaksOfPyTorch(device), renew=torch.cuda.empty_cache)
        self._peaks, self.aside, self.tidy, self.renew = memory
        self.lap = self._peaks.lap
        self.delayed = self._peaks.delayed
        # PyTorch's own, without a frame of ours around them: both are asked for with every tensor that moves. What
        # `torch.cuda.current_stream` does with the first takes seven microseconds.
        self.stream: Callable[[], tuple[int, int, int]] = functools.partial(
            torch._C._cuda_getCurrentStream, device.index
        )
        self.capturing: Callable[[], bool] = torch._C._cuda_isCurrentStreamCapturing
        self._counters = counters
        self._laps = Laps(str(device), counters)
        self._before = 0  # the most in use since the last period ended, as far as it counts
        self.waited: list[Gap] | None = None  # what a meter leaves out
        self.operators: OperatorClock | None = None
        _, self._retries = self._peaks.restart()

    def empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def mark(self, stream: Stream) -> TimedEvent:
        return _mark(wrapped(stream))

    def follow(self, stream: Stream, event: Event) -> Gap | None:
        """Let `stream` go on only after `event`; when it got there and when it went on, or None if that was passed."""
        assert isinstance(event, torch.cuda.Event)
        if event.query():
            return None
        reached = self.mark(stream)
        wrapped(stream).wait_event(event)
        return reached, self.mark(stream)

    def hold(self, stream: Stream, event: Event) -> None:
        """Let `stream` go on only after `event`."""
        assert isinstance(event, torch.cuda.Event)
        wrapped(stream).wait_event(event)

    def time_waits(self, periods: int) -> None:
        self._laps.stand_for = periods

    def wait(self, event: Event, cause: str, stream: Stream) -> None:
        timed = self._laps.stand_for or self.waited is not None or self.capturing()
        reached: TimedEvent | None = None
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
        self._laps.waited(cause, gap)
        if self.waited is not None:
            self.waited.append(gap)

    def outlast(self, event: Event, stream: Stream) -> None:
        # What the lane reads from now on is nobody's any more, so it might be overwritten; but not unmapped, as the
        # allocator does with memory that is free (expandable segments) once that memory's own stream is done.
        self.wait(event, "d2h", stream)

    def hand_over(self, buffer: torch.Tensor) -> None:
        buffer.record_stream(torch.cuda.current_stream(self.device))

    def settle(self) -> Lap | None:
        if self.capturing():
            self._laps.period_passed()
            return None
        return self._laps.period_over(lambda: self.mark(self.stream()))

    def idle(self) -> bool:
        return self._laps.idle()

    def when(self, event: Event, recorded: float) -> float:
        return self._laps.when(cast("TimedEvent", event), recorded)

    def close(self) -> None:
        self._laps.close(capturing=self.capturing())

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device)

    def hold_up(self, seconds: float) -> None:
        """Have the present stream do nothing for so long, while the host goes on; not within a capture."""
        if self.capturing():
            return
        properties = torch.cuda.get_device_properties(self.device)
        rate = getattr(properties, "clock_rate", 0) * 1e3 or CLOCK  # which is in kHz, where PyTorch tells it
        with torch.cuda.device(self.device):
            torch.cuda._sleep(int(seconds * rate))

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
            self._flushed(retries)  # what did so was no period either

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


def _mark(stream: torch.cuda.Stream, *, timed: bool = True) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=timed)
    event.record(stream)
    return event


def _set_stream(stream: tuple[int, int, int]) -> None:
    # What `with torch.cuda.stream(...)` does, without the fifteen microseconds around it.
    number, device, kind = stream
    torch._C._cuda_setStream(stream_id=number, device_index=device, device_type=kind)


class TimedLane:
    """What lanes of a GPU have in common: now and then they time a copy."""

    def __init__(self, device: torch.device, name: str, counters: Counters) -> None:
        self._device = device
        self._name = name
        self._counters = counters
        # Several threads may train on the device, and a lane takes one copy at a time.
        self._submitting = threading.RLock()
        self._timed: deque[tuple[int, TimedEvent, TimedEvent]] = deque()
        self._asking = threading.Lock()
        self._untimed = TIMED_EVERY  # bytes since a copy was timed

    def over(self, since: Event) -> list[Transfer]:
        start = cast("TimedEvent", since)
        found: list[Transfer] = []
        with self._asking:  # a query lets other threads go on, and each ends periods of its own
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


class CudaLane(TimedLane):
    """A CUDA stream made once. Small pieces that leave are gathered on the GPU and go as one DMA."""

    def __init__(self, device: torch.device, name: str, counters: Counters) -> None:
        super().__init__(device, name, counters)
        self._stream = torch.cuda.Stream(device)
        self._staging: torch.Tensor | None = None

    def copy(self, pieces: Iterable[Piece], after: Sequence[Event], behind: Stream = None) -> Event:
        if behind is not None:
            after = (*after, _mark(wrapped(behind), timed=False))
        small: list[Piece] = []
        large: list[Piece] = []
        for piece in pieces:
            # Gathered on the lane's own stream, whose copy engine idles meanwhile: larger ones would lose by it.
            (small if piece.nbytes < FULL_SPEED and piece.source.is_cuda else large).append(piece)
        nbytes = sum(piece.nbytes for piece in (*small, *large))
        with self._submitting:
            if self._is_timed((*small, *large), nbytes):
                begin = self._reach(after)
                done = self._carry_out(large, small, (), timed=True)
                self._timed.append((nbytes, begin, done))
            else:
                done = self._carry_out(large, small, after, timed=False)
        self._counters.moved[self._name] += nbytes
        return done

    def _reach(self, after: Sequence[Event]) -> TimedEvent:
        """Wait for `after`; the event says when that is over, and the lane free for what follows."""
        self._wait(after)
        return _mark(self._stream)

    def _wait(self, after: Sequence[Event]) -> None:
        for event in after:
            assert isinstance(event, torch.cuda.Event)
            self._stream.wait_event(event)

    def _carry_out(
        self, large: Sequence[Piece], small: Sequence[Piece], after: Sequence[Event], *, timed: bool
    ) -> TimedEvent:
        with self._on_stream():
            try:
                self._wait(after)
                for piece in large:
                    _copy(piece)
                self._gather_all(small)
            except BaseException:  # such as no room to gather in
                self._stream.synchronize()  # the caller takes it that nothing is under way, and gives memory to others
                raise
            return _mark(self._stream, timed=timed)

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        stream = self._stream
        device, before = torch._C._cuda_getDevice(), torch._C._cuda_getCurrentStream(self._device.index)
        _set_stream((stream.stream_id, stream.device_index, stream.device_type))
        try:
            yield
        finally:
            _set_stream(before)
            if device != self._device.index:  # to set a stream is to go to its device
                torch._C._cuda_setDevice(device)

    def _gather_all(self, small: Sequence[Piece]) -> None:
        for run in _adjacent(small):
            self._gather(run)

    def _gather(self, run: list[Piece]) -> None:
        if len(run) == 1:
            _copy(run[0])
            return
        first = run[0].at
        nbytes = run[-1].at + run[-1].nbytes - first
        staging = self._staging_for(nbytes).untyped_storage()
        slots, sources = [], []
        for _, at, source, start, size in run:
            # As words of eight, where they divide: the gathering kernel copies element by element.
            if size % 8:
                _copy(Piece(staging, at - first, source, start, size))
            else:
                slots.append(flat(staging, at - first, size, torch.int64))
                sources.append(flat(source, start, size, torch.int64))
        if slots:
            torch._foreach_copy_(slots, sources)
        _copy(Piece(run[0].target, first, staging, 0, nbytes))

    def _staging_for(self, nbytes: int) -> torch.Tensor:
        """HBM to gather in. To be called on the lane's stream."""
        if self._staging is None or self._staging.numel() < nbytes:
            # Used only on this lane's stream, one run after the other: the stream's order is all the
            # protection it needs.
            self._staging = torch.empty(round_up(nbytes, PAGE), dtype=torch.uint8, device=self._device)
        return self._staging

    def close(self) -> None:
        self._stream.synchronize()


def _copy(piece: Piece) -> None:
    target, at, source, start, nbytes = piece
    flat(target, at, nbytes).copy_(flat(source, start, nbytes), non_blocking=True)


def _adjacent(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Runs of pieces whose places in the target follow one another, slot by slot, in at most `STAGING` bytes."""
    runs: list[list[Piece]] = []
    end = first = -1
    for piece in sorted(pieces, key=lambda piece: piece.at):
        if not (runs and 0 <= piece.at - end < SLOT and piece.at + piece.nbytes - first <= STAGING):
            runs.append([])
            first = piece.at
        runs[-1].append(piece)
        end = piece.at + piece.nbytes
    return runs
