"""Compute and lanes on a GPU with the native library: the same streams, at a fraction of the host's time."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import torch

from allocator.native import lane
from migrator.counters import Counters
from migrator.lanes import GATHERED, Event, Piece, Stream
from migrator.lanes.cuda import STAGING, CudaCompute, CudaLane, wrapped


class NativeCompute(CudaCompute):
    """The current stream, waited for and marked through the driver."""

    def __init__(
        self,
        device: torch.device,
        counters: Counters,
        library: lane.Library,
        lap: Callable[[], int] | None = None,
    ) -> None:
        super().__init__(device, counters, lap)
        self._library = library

    def mark(self, stream: Stream) -> lane.TimedEvent:
        return self._library.record(self.device.index, wrapped(stream).cuda_stream)

    def follow(self, stream: Stream, event: Event) -> tuple[lane.TimedEvent, lane.TimedEvent] | None:
        assert isinstance(event, lane.Event)
        return self._library.follow(self.device.index, wrapped(stream).cuda_stream, event)


class NativeLane(CudaLane):
    """A CUDA stream made once; each copy is one call.

    Pieces that leave are gathered by a kernel of ours, on a stream beside the lane's own.
    """

    def __init__(self, device: torch.device, name: str, counters: Counters, library: lane.Library) -> None:
        super().__init__(device, name, counters)
        self._library = library
        self._handle: int = self._stream.cuda_stream
        self._room: torch.Tensor | None = None  # what the gathering writes to
        self._gathering = self._open_staging() if name == "d2h" else None

    def copy(self, pieces: Sequence[Piece], after: Sequence[Event], behind: Stream = None) -> lane.Event:
        numbers: list[int] = []  # not yet an array, which takes six times as long to grow
        total = small = 0
        for target, at, source, start, nbytes in pieces:
            numbers += (target.data_ptr() + at, source.data_ptr() + start, nbytes)
            total += nbytes
            if nbytes <= GATHERED:
                small += 1
        gathering = self._gathering if small > 1 else None
        stream = None if behind is None else wrapped(behind).cuda_stream
        with self._submitting:
            submission = (self._device.index, self._handle, array("Q", numbers), _native(after), stream, gathering)
            done: lane.Event
            # One that is gathered waits for the device between its copies, which says nothing of the link.
            if gathering is None and self._is_timed(pieces, total):
                begin, done = self._library.timed_copy(*submission)
                self._timed.append((total, begin, done))
            else:
                done = self._library.copy(*submission)
        self._counters.moved[self._name] += total
        return done

    def _open_staging(self) -> lane.Staging | None:
        """Where to gather; None if there is no room or no kernel for it, and each piece is to leave by itself.

        Made with the lane, before HBM is full: later it would come off what a plan counts on.
        """
        # Before the program's kernels, whose blocks would keep the lane waiting for as long as they fill the device.
        beside = torch.cuda.Stream(self._device, priority=-1)
        try:
            with torch.cuda.stream(beside):  # which is the first to write there
                room = torch.empty(STAGING, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError:
            return None
        room.record_stream(self._stream)  # which reads it to the last
        staging = self._library.staging(self._device.index, beside.cuda_stream, room.data_ptr(), STAGING, GATHERED)
        self._room = None if staging is None else room
        return staging


def _native(events: Sequence[Event]) -> list[lane.Event]:
    native = [event for event in events if isinstance(event, lane.Event)]
    assert len(native) == len(events), "events of another kind of lane"
    return native
