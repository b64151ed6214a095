"""Compute and lanes on a GPU with the native library: the same streams, at a fraction of the host's time."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import torch

from torch_tiers.allocator.native import lane
from torch_tiers.migrator.lanes import Event, Leaving, Memory, Piece, Stream
from torch_tiers.migrator.lanes.cuda import CudaCompute, TimedLane, wrapped
from torch_tiers.migrator.telemetry.counters import Counters


class NativeCompute(CudaCompute):
    """The current stream, waited for and marked through the driver."""

    def __init__(
        self,
        device: torch.device,
        counters: Counters,
        library: lane.Library,
        memory: Memory | None = None,
    ) -> None:
        super().__init__(device, counters, memory)
        self._library = library

    def mark(self, stream: Stream) -> lane.TimedEvent:
        return self._library.record(self.device.index, wrapped(stream).cuda_stream)

    def hold(self, stream: Stream, event: Event) -> None:
        assert isinstance(event, lane.Event)
        self._library.wait(self.device.index, wrapped(stream).cuda_stream, event)

    def follow(self, stream: Stream, event: Event) -> tuple[lane.TimedEvent, lane.TimedEvent] | None:
        assert isinstance(event, lane.Event)
        return self._library.follow(self.device.index, wrapped(stream).cuda_stream, event)


class NativeLane(TimedLane):
    """A lane of the native library; a copy takes few calls of the driver, and its pieces leave as they lie."""

    def __init__(self, device: torch.device, name: str, counters: Counters, library: lane.Library) -> None:
        super().__init__(device, name, counters)
        self._library = library
        self._lane = library.open(device.index)

    def copy(self, pieces: Iterable[Piece], after: Sequence[Event], behind: Stream = None) -> lane.Event:
        if isinstance(pieces, Leaving):  # in one call, where that is native
            total, spans = pieces.nbytes, array("Q", pieces.spans(pieces.members, pieces.block.data_ptr()))
        else:
            pieces = tuple(pieces)
            total, spans = sum(piece.nbytes for piece in pieces), array("Q")
            for target, at, source, start, nbytes in pieces:
                spans.extend((target.data_ptr() + at, source.data_ptr() + start, nbytes))
        stream = None if behind is None else wrapped(behind).cuda_stream
        submission = (self._lane, spans, _native(after), stream)
        with self._submitting:
            done: lane.Event
            if self._is_timed(pieces, total):
                begin, done = self._library.timed_copy(*submission)
                self._timed.append((total, begin, done))
            else:
                done = self._library.copy(*submission)
        self._counters.moved[self._name] += total
        return done

    def close(self) -> None:
        with self._submitting:
            self._lane.synchronize()


def _native(events: Sequence[Event]) -> list[lane.Event]:
    native = [event for event in events if isinstance(event, lane.Event)]
    assert len(native) == len(events), "events of another kind of lane"
    return native
