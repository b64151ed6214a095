"""Compute and lanes on a GPU with the native library: the same streams, at a fraction of the host's time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from allocator.native import lane
from allocator.sizes import KiB
from migrator.counters import Counters
from migrator.lanes import Event, Piece, Stream
from migrator.lanes.cuda import CudaCompute, CudaLane

GATHER_BELOW = 256 * KiB  # with so little time per copy, gathering pays only for smaller pieces


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

    def mark(self, stream: Stream) -> lane.Event:
        return self._library.record(self.device.index, self._wrapped(stream).cuda_stream)

    def order(self, stream: Stream, event: Event) -> None:
        assert isinstance(event, lane.Event)
        self._library.wait(self.device.index, self._wrapped(stream).cuda_stream, event)


class NativeLane(CudaLane):
    """A CUDA stream made once; what is not gathered leaves in one call."""

    gather_below = GATHER_BELOW

    def __init__(self, device: torch.device, name: str, counters: Counters, library: lane.Library) -> None:
        super().__init__(device, name, counters)
        self._library = library
        self._handle: int = self._stream.cuda_stream

    def _reach(self, after: Sequence[Event]) -> lane.Event:
        return self._library.copy(self._device.index, self._handle, (), _native(after))

    def _carry_out(self, large: Sequence[Piece], small: Sequence[Piece], after: Sequence[Event]) -> lane.Event:
        spans = [
            (target.data_ptr() + at, source.data_ptr() + start, nbytes) for target, at, source, start, nbytes in large
        ]
        done = self._library.copy(self._device.index, self._handle, spans, _native(after))
        if not small:
            return done
        with self._on_stream():
            self._gather_all(small)
        return self._library.record(self._device.index, self._handle)


def _native(events: Sequence[Event]) -> list[lane.Event]:
    native = [event for event in events if isinstance(event, lane.Event)]
    assert len(native) == len(events), "events of another kind of lane"
    return native
