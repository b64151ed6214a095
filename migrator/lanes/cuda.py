"""Compute and lanes on a GPU: CUDA streams. Nothing here blocks the host."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import cast

import torch

from allocator.sizes import PAGE, MiB, round_up
from migrator import peaks
from migrator.counters import Counters
from migrator.lanes import GATHER_BELOW, SLOT, TIMED, Event, Piece, Stream, at_full_speed
from migrator.transfers import Transfer

STAGING = 16 * MiB  # gathered bytes per DMA: the link's full speed


class CudaCompute:
    """The current stream of a CUDA device, asked for at each use: a program may change it at any time."""

    def __init__(self, device: torch.device, counters: Counters) -> None:
        self.device = device
        self._counters = counters
        self._waits: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._streams: dict[Stream, torch.cuda.Stream] = {}
        self._retries = peaks.retries(device)
        peaks.restart(device)

    def empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def stream(self) -> tuple[int, int, int]:
        # PyTorch's own triple; `torch.cuda.current_stream` takes seven microseconds to wrap it, and this is asked
        # for with every tensor that moves.
        handle: tuple[int, int, int] = torch._C._cuda_getCurrentStream(self.device.index)
        return handle

    def mark(self, stream: Stream) -> torch.cuda.Event:
        return _mark(self._wrapped(stream))

    def wait(self, event: Event, cause: str, stream: Stream) -> None:
        assert isinstance(event, torch.cuda.Event)
        if event.query():
            return
        wrapped = self._wrapped(stream)
        self._waits.append((cause, _mark(wrapped), event))
        wrapped.wait_event(event)

    def outlast(self, event: Event, stream: Stream) -> None:
        # What the lane reads from now on is nobody's any more, so it might be overwritten; but not unmapped, as the
        # allocator does with memory that is free (expandable segments) once that memory's own stream is done.
        self.wait(event, "d2h", stream)

    def hand_over(self, buffer: torch.Tensor) -> None:
        buffer.record_stream(torch.cuda.current_stream(self.device))

    def capturing(self) -> bool:
        return bool(torch._C._cuda_isCurrentStreamCapturing())

    def _wrapped(self, stream: Stream) -> torch.cuda.Stream:
        wrapped = self._streams.get(stream)
        if wrapped is None:
            number, device, kind = cast("tuple[int, int, int]", stream)
            wrapped = torch.cuda.Stream(stream_id=number, device_index=device, device_type=kind)
            self._streams[stream] = wrapped
        return wrapped

    def settle(self) -> None:
        waits, self._waits = self._waits, []
        for cause, reached, passed in waits:
            if not (reached.query() and passed.query()):
                self._waits.append((cause, reached, passed))
            elif (seconds := reached.elapsed_time(passed) / 1e3) > 0:
                self._counters.stalled(cause, seconds)

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device)

    def peak(self, resident: int) -> int:
        peak = peaks.since_restart(self.device)
        peaks.restart(self.device)
        return peak

    def pressed(self) -> bool:
        before, self._retries = self._retries, peaks.retries(self.device)
        return self._retries > before

    def reserved(self) -> int:
        return torch.cuda.max_memory_reserved(self.device)


def _mark(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event


def _set_stream(stream: tuple[int, int, int]) -> None:
    # What `with torch.cuda.stream(...)` does, without the fifteen microseconds around it.
    number, device, kind = stream
    torch._C._cuda_setStream(stream_id=number, device_index=device, device_type=kind)


class CudaLane:
    """A CUDA stream made once. Small pieces that leave are gathered on the GPU and go as one DMA."""

    def __init__(self, device: torch.device, name: str, counters: Counters) -> None:
        self._stream = torch.cuda.Stream(device)
        self._device = device
        self._name = name
        self._counters = counters
        self._staging: torch.Tensor | None = None
        self._timed: deque[tuple[int, torch.cuda.Event, torch.cuda.Event]] = deque()

    def copy(self, pieces: Sequence[Piece], after: Sequence[Event]) -> torch.cuda.Event:
        stream = self._stream
        device, before = torch._C._cuda_getDevice(), torch._C._cuda_getCurrentStream(self._device.index)
        _set_stream((stream.stream_id, stream.device_index, stream.device_type))
        try:
            for event in after:
                assert isinstance(event, torch.cuda.Event)
                stream.wait_event(event)
            begin = _mark(stream) if len(self._timed) < TIMED and at_full_speed(pieces) else None
            small = [piece for piece in pieces if piece[0].numel() < GATHER_BELOW and piece[1].is_cuda]
            for destination, source in pieces:
                if destination.numel() >= GATHER_BELOW or not source.is_cuda:
                    destination.copy_(source, non_blocking=True)
            for run in _adjacent(small):
                self._gather(run)
            done = _mark(stream)
        finally:
            _set_stream(before)
            if device != self._device.index:  # to set a stream is to go to its device
                torch._C._cuda_setDevice(device)
        nbytes = sum(piece[0].numel() for piece in pieces)
        self._counters.moved[self._name] += nbytes
        if begin is not None:
            self._timed.append((nbytes, begin, done))
        return done

    def over(self, since: Event) -> list[Transfer]:
        assert isinstance(since, torch.cuda.Event)
        found: list[Transfer] = []
        while self._timed and self._timed[0][2].query():
            nbytes, begin, done = self._timed.popleft()
            times = (since.elapsed_time(event) / 1e3 for event in (begin, done))
            found.append(Transfer(self._name, nbytes, *times))
        return found

    def _gather(self, run: list[Piece]) -> None:
        if len(run) == 1:
            run[0][0].copy_(run[0][1], non_blocking=True)
            return
        start = run[0][0].data_ptr()
        nbytes = run[-1][0].data_ptr() - start + run[-1][0].numel()
        if self._staging is None or self._staging.numel() < nbytes:
            # Allocated on this lane's stream and used only there, one run after the other: the
            # stream's order is all the protection it needs.
            self._staging = torch.empty(round_up(nbytes, PAGE), dtype=torch.uint8, device=self._device)
        slots = [self._staging.narrow(0, d.data_ptr() - start, d.numel()) for d, _ in run]
        torch._foreach_copy_([_wide(slot) for slot in slots], [_wide(source) for _, source in run])
        host = run[0][0].as_strided((nbytes,), (1,))
        host.copy_(self._staging[:nbytes], non_blocking=True)

    def close(self) -> None:
        self._stream.synchronize()


def _adjacent(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Runs of pieces whose destinations follow one another, slot by slot, in at most `STAGING` bytes."""
    runs: list[list[Piece]] = []
    end = start = -1
    for piece in sorted(pieces, key=lambda piece: piece[0].data_ptr()):
        at = piece[0].data_ptr()
        if not (runs and 0 <= at - end < SLOT and at + piece[0].numel() - start <= STAGING):
            runs.append([])
            start = at
        runs[-1].append(piece)
        end = at + piece[0].numel()
    return runs


def _wide(flat: torch.Tensor) -> torch.Tensor:
    """The same bytes as words of eight, where they divide: the gathering kernel copies element by element."""
    return flat.view(torch.int64) if flat.numel() % 8 == 0 else flat
