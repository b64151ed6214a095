"""Lanes and the compute stream: the one place where the migrator touches streams and events.

A *lane* is one direction of the link between HBM and DRAM. It takes copies, carries them out in
order beside the program, and hands back an event for each. *Compute* is the program's own stream.
Both exist twice: on a GPU they are CUDA streams, and nothing here ever blocks the host; without a
GPU a lane is a thread, host memory plays HBM, and a wait of the compute stream is a wait of the host.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Hashable, Sequence
from typing import Protocol, cast

import torch

from allocator.sizes import PAGE, MiB, round_up
from migrator import peaks
from migrator.counters import Counters

SLOT = 512
"""Alignment of a storage within its group, in bytes: PyTorch's own for CUDA blocks. Kernels choose
their code path by alignment, so a tensor that comes back must be aligned as it was, or results differ."""

GATHER_BELOW = 1 * MiB  # a plain copy of this size reaches 90% of the link; below, gathering wins
STAGING = 16 * MiB  # gathered bytes per DMA: the link's full speed

Piece = tuple[torch.Tensor, torch.Tensor]
"""(destination, source): flat uint8 tensors of one size."""


class Event(Protocol):
    """A point in the order of a lane or of the compute stream."""

    def query(self) -> bool:
        """Whether it has been passed."""

    def synchronize(self) -> None:
        """Block the host until it has been passed; raises what the work before it raised."""


class Lane(Protocol):
    """One direction of one link."""

    def copy(self, pieces: Sequence[Piece], after: Sequence[Event]) -> Event:
        """Copy every piece once all events of `after` have been passed; the event says when it is done."""

    def close(self) -> None:
        """Wait for what was submitted and end."""


Stream = Hashable
"""One of the program's streams."""


class Compute(Protocol):
    """The program's own stream on one device."""

    device: torch.device

    def empty(self, nbytes: int) -> torch.Tensor:
        """HBM that may be written once `mark` (taken afterwards) has been passed."""

    def stream(self) -> Stream:
        """The stream the program is on now. What is true of one stream says nothing about another."""

    def mark(self, stream: Stream) -> Event:
        """The end of everything that `stream` was given so far."""

    def wait(self, event: Event, cause: str, stream: Stream) -> None:
        """Let `stream` go on only after `event`; what it waits counts as a stall of `cause`."""

    def outlast(self, event: Event, stream: Stream) -> None:
        """Memory of `stream` that a lane reads until `event` is about to be given back to the allocator."""

    def hand_over(self, buffer: torch.Tensor) -> None:
        """Tell the allocator that `buffer` is used on the present stream as well as on its own."""

    def capturing(self) -> bool:
        """Whether the program is being captured into a graph, which no lane may become a part of."""

    def settle(self) -> None:
        """Add up the waits that are over by now, without blocking."""

    def allocated(self) -> int:
        """Bytes of HBM in use now, without what is cached; 0 where nobody counts them."""

    def peak(self, resident: int) -> int:
        """The most that was in use since this was last called; `resident` is the most of it that was saved bytes."""

    def pressed(self) -> bool:
        """Whether the allocator had to give up cached memory to stay within the budget since this was last called."""

    def reserved(self) -> int:
        """The most HBM that was ever taken from the device, cached memory included."""


# ------------------------------------------------------------------------------------------- CUDA


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

    def copy(self, pieces: Sequence[Piece], after: Sequence[Event]) -> torch.cuda.Event:
        stream = self._stream
        device, before = torch._C._cuda_getDevice(), torch._C._cuda_getCurrentStream(self._device.index)
        _set_stream((stream.stream_id, stream.device_index, stream.device_type))
        try:
            for event in after:
                assert isinstance(event, torch.cuda.Event)
                stream.wait_event(event)
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
        self._counters.moved[self._name] += sum(piece[0].numel() for piece in pieces)
        return done

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


# ------------------------------------------------------------------------------------------- host


class HostEvent:
    """Passed when set; carries the error of the work it stands for."""

    def __init__(self) -> None:
        self._passed = threading.Event()
        self._error: BaseException | None = None

    def query(self) -> bool:
        return self._passed.is_set()

    def synchronize(self) -> None:
        self._passed.wait()
        if self._error is not None:
            raise self._error

    def set(self, error: BaseException | None = None) -> None:
        """Let everybody pass, or fail with `error`."""
        self._error = error
        self._passed.set()


class HostCompute:
    """A program on the CPU: whatever it asked for has happened when the call returns.

    Attributes
    ----------
    static : int
        Bytes of weights, gradients and optimizer state, as far as they were seen: nobody else counts
        the memory of a program on the CPU.
    """

    device = torch.device("cpu")

    def __init__(self, counters: Counters) -> None:
        self.static = 0
        self._highest = 0
        self._counters = counters
        self._now = HostEvent()
        self._now.set()

    def empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def mark(self, stream: Stream) -> HostEvent:
        return self._now

    def wait(self, event: Event, cause: str, stream: Stream) -> None:
        if not event.query():
            with self._counters.waiting(cause):
                event.synchronize()
        else:
            event.synchronize()  # raises what the copy raised

    def stream(self) -> Stream:
        return None

    def outlast(self, event: Event, stream: Stream) -> None:
        """The lane itself holds what it still reads."""

    def hand_over(self, buffer: torch.Tensor) -> None:
        """One stream: nothing to tell."""

    def capturing(self) -> bool:
        return False

    def settle(self) -> None:
        """Waits were counted when they happened."""

    def allocated(self) -> int:
        return 0

    def peak(self, resident: int) -> int:
        self._highest = max(self._highest, self.static + resident)
        return self.static + resident

    def pressed(self) -> bool:
        return False

    def reserved(self) -> int:
        return self._highest


class HostLane:
    """A thread that copies. `bytes_per_second` slows it down to play a link of that speed."""

    def __init__(self, name: str, counters: Counters, bytes_per_second: float | None = None) -> None:
        self._name = name
        self._counters = counters
        self._speed = bytes_per_second
        self._closing = threading.Lock()
        self._closed = False
        self._jobs: queue.SimpleQueue[tuple[Sequence[Piece], Sequence[Event], HostEvent] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"tiers-{name}", daemon=True)
        self._thread.start()

    def copy(self, pieces: Sequence[Piece], after: Sequence[Event]) -> HostEvent:
        done = HostEvent()
        self._counters.moved[self._name] += sum(piece[0].numel() for piece in pieces)
        with self._closing:
            if not self._closed:
                self._jobs.put((pieces, after, done))
                return done
        # A graph may outlive the session that saved its tensors: then whoever wants them copies himself.
        done.set(self._carry_out(pieces, after))
        return done

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            pieces, after, done = job
            # Before the event is set nothing here may refer to the tensors any more: whoever waits for
            # it may look at once whether their memory is free. (The next get blocks with them bound, too.)
            del job
            error = self._carry_out(pieces, after)
            del pieces, after
            done.set(error)
            del done

    def _carry_out(self, pieces: Sequence[Piece], after: Sequence[Event]) -> BaseException | None:
        try:
            for event in after:
                event.synchronize()
            for destination, source in pieces:
                # numpy's copy, not torch's: torch would start a second pool of threads for this one.
                destination.numpy()[:] = source.numpy()
            if self._speed:
                time.sleep(sum(piece[0].numel() for piece in pieces) / self._speed)
        except BaseException as error:  # handed to whoever waits for the copy
            return error
        return None

    def close(self) -> None:
        with self._closing:
            if self._closed:
                return
            self._closed = True
            self._jobs.put(None)
        self._thread.join()
