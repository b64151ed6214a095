"""Has an optimizer update state in HBM that lies in DRAM: it comes before its slice's update, and leaves after it.

An update on the GPU could read DRAM itself, at nine tenths of the speed of copies, if it reads each byte once. But most
optimizers are a sequence of operators, each of which reads and writes all of the state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from torch_tiers.allocator.extents import Extent, ExtentMap
from torch_tiers.migrator.state.kept import Kept
from torch_tiers.migrator.streams import Compute, Event, Lane
from torch_tiers.migrator.streams.pieces import SLOT, Piece

STALL = "state"


class _Place(NamedTuple):
    """A tensor's place in the buffer."""

    kept: Kept
    name: str
    tensor: Tensor
    extent: Extent


class _Coming(NamedTuple):
    """A slice on its way into the buffer."""

    kept: Sequence[Kept]
    places: Sequence[_Place]
    ready: Event


class _Leaving(NamedTuple):
    """A slice on its way out of the buffer."""

    places: Sequence[_Place]
    gone: Event


class StateStreamer:
    """Brings state of one device. Thread-safe, as lanes are.

    Parameters
    ----------
    compute : Compute
        The program's streams.
    read, write : Lane
        From DRAM to HBM, and back.
    """

    def __init__(self, compute: Compute, read: Lane, write: Lane) -> None:
        self._compute = compute
        self._read = read
        self._write = write

    def run(self, slices: Iterable[Sequence[Kept]], buffer: Tensor, update: Callable[[Sequence[Kept]], None]) -> None:
        """Call `update` for each slice while its tensors are in `buffer`, which is flat and holds each slice.

        Once the present stream has passed this, the state is in DRAM again, and nobody uses the buffer. When this
        raises, call `close` before anybody else has the buffer's memory.
        """
        stream = self._compute.stream()
        room = ExtentMap(buffer.numel(), SLOT)
        after = [self._compute.mark(stream)]  # of whoever wrote the state, and had the buffer's memory
        left, coming, leaving = deque(slices), deque[_Coming](), deque[_Leaving]()
        while left or coming:
            while left and (places := _find(left[0], room, leaving, after)) is not None:
                ready = self._read.copy([_into(place, buffer) for place in places], tuple(after))
                coming.append(_Coming(left.popleft(), places, ready))
            now = coming.popleft()
            self._compute.wait(now.ready, STALL, stream)
            try:
                with _in_place_of_state(now.places, buffer):
                    update(now.kept)
            finally:  # some of it may be updated, and its parameters with it
                back = [_out_of(place, buffer) for place in now.places]
                leaving.append(_Leaving(now.places, self._write.copy(back, [self._compute.mark(stream)])))
        if leaving:
            self._compute.wait(leaving[-1].gone, STALL, stream)

    def close(self) -> None:
        """Wait for copies that are under way. No more may come."""
        self._read.close()
        self._write.close()


def _find(kept: Sequence[Kept], room: ExtentMap, leaving: deque[_Leaving], after: list[Event]) -> list[_Place] | None:
    """Find places for a slice, where one that leaves may be; None if it has to wait for one that has yet to leave.

    Copies into the places must come `after` what has been added to that.
    """
    places: list[_Place] = []
    for each in kept:
        for name, tensor in each.tensors.items():
            while (extent := room.allocate(tensor.untyped_storage().nbytes())) is None and leaving:
                gone = leaving.popleft()
                after[1:] = [gone.gone]  # copies of a lane are over in order
                for place in gone.places:
                    room.free(place.extent)
            if extent is None:
                for place in places:
                    room.free(place.extent)
                return None
            places.append(_Place(each, name, tensor, extent))
    return places


def _into(place: _Place, buffer: Tensor) -> Piece:
    source = place.tensor.untyped_storage()
    return Piece(buffer.untyped_storage(), place.extent.offset, source, 0, source.nbytes())


def _out_of(place: _Place, buffer: Tensor) -> Piece:
    target = place.tensor.untyped_storage()
    return Piece(target, 0, buffer.untyped_storage(), place.extent.offset, target.nbytes())


@contextmanager
def _in_place_of_state(places: Iterable[_Place], buffer: Tensor) -> Iterator[None]:
    """Let the optimizer have tensors on the buffer for its own; whatever it puts in their place is left there."""
    streamed = [(place, _on(buffer, place)) for place in places]
    try:
        for place, tensor in streamed:
            place.kept.state[place.name] = tensor
        yield
    finally:
        for place, tensor in streamed:
            if place.kept.state.get(place.name) is tensor:
                place.kept.state[place.name] = place.tensor


def _on(buffer: Tensor, place: _Place) -> Tensor:
    """A tensor as the state's is, at its place in the buffer."""
    like = place.tensor
    offset = place.extent.offset // like.element_size()
    return torch.empty(0, dtype=like.dtype, device=like.device).set_(
        buffer.untyped_storage(), offset, like.size(), like.stride()
    )
