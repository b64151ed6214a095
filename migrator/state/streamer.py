"""Copies optimizer state, and master weights, from host memory to a buffer in HBM, slice by slice, to be updated there.

The slice is then copied back. An optimizer could read and write DRAM itself, at nine tenths of the speed of copies, if
it reads each byte once. But most optimizers are a sequence of operators, each of which reads or writes all of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from torch_tiers.allocator.extents import Extent, ExtentMap
from torch_tiers.migrator.state.parameter_state import PARAMETER, ParameterState, version_of
from torch_tiers.migrator.streams import Compute, Event, Lane
from torch_tiers.migrator.streams.pieces import SLOT, Piece, first_byte

STALL = "state"


class _Place(NamedTuple):
    """A tensor's place in the buffer: it begins at byte `at` of the buffer's storage."""

    of: ParameterState
    name: str
    tensor: Tensor
    extent: Extent
    at: int


class _Coming(NamedTuple):
    """A slice on its way into the buffer."""

    slice_: Sequence[ParameterState]
    places: Sequence[_Place]
    ready: Event


class _WrittenBack(NamedTuple):
    """A slice on its way out of the buffer."""

    places: Sequence[_Place]
    gone: Event


class StateStreamer:
    """Streams state of one device. Thread-safe, as lanes are.

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

    def run(
        self,
        slices: Iterable[Sequence[ParameterState]],
        buffer: Tensor,
        update: Callable[[Sequence[ParameterState]], None],
        on_write_back: Callable[[Event], None] = lambda done: None,
    ) -> None:
        """Call `update` for each slice while its tensors are in `buffer`, which is flat and holds each slice.

        It is given the slice with the tensors that are in the buffer, as parameters and state. The optimizer's own
        state always has its own tensors. What else `update` puts into the state of a whole parameter, the optimizer has
        afterwards. After each update `on_write_back` is called with the event of the copy back.

        Once the present stream has passed this, all of it is in DRAM again, and nobody uses the buffer. When this
        raises, call `close` before anybody else has the buffer's memory.
        """
        stream = self._compute.stream()
        extents = ExtentMap(buffer.numel(), SLOT)
        start = self._compute.mark(stream)  # of whoever wrote the state, and had the buffer's memory
        waiting, coming, written = iter(slices), deque[_Coming](), deque[_WrittenBack]()
        following = next(waiting, None)
        while following or coming:
            while following:
                after = [start]
                while (places := _places(following, extents, buffer)) is None and written:
                    back = written.popleft()
                    after.append(back.gone)  # what was in its place comes first; and fails it, if that has failed
                    for place in back.places:
                        extents.free(place.extent)
                if places is None:  # before the next slice is updated
                    break
                ready = self._read.copy([_into(place, buffer) for place in places], after)
                coming.append(_Coming(following, places, ready))
                following = next(waiting, None)
            now = coming.popleft()
            self._compute.wait(now.ready, STALL, stream)
            try:
                brought = _brought(now, buffer)
                versions = [version_of(each.parameter) for each in brought]
                update(brought)
                _take_over(now.slice_, brought, versions)
            finally:  # some of it may be updated, and its parameters with it
                pieces = [_out_of(place, buffer) for place in now.places]
                written.append(_WrittenBack(now.places, self._write.copy(pieces, [self._compute.mark(stream)])))
                on_write_back(written[-1].gone)
        for back in written:
            self._compute.wait(back.gone, STALL, stream)

    def close(self) -> None:
        """Wait for copies that are under way. No more may come."""
        self._read.close()
        self._write.close()


def _places(slice_: Sequence[ParameterState], extents: ExtentMap, buffer: Tensor) -> list[_Place] | None:
    """Take places for a slice; None if the buffer has no room for it now."""
    start = int(buffer.storage_offset())
    places: list[_Place] = []
    for each in slice_:
        for name, tensor in each.tensors.items():
            extent = extents.allocate(tensor.nbytes)
            if extent is None:
                for place in places:
                    extents.free(place.extent)
                return None
            places.append(_Place(each, name, tensor, extent, start + extent.offset))
    return places


def _into(place: _Place, buffer: Tensor) -> Piece:
    source, first = place.tensor.untyped_storage(), first_byte(place.tensor)
    return Piece(buffer.untyped_storage(), place.at, source, first, place.tensor.nbytes)


def _out_of(place: _Place, buffer: Tensor) -> Piece:
    target, first = place.tensor.untyped_storage(), first_byte(place.tensor)
    return Piece(target, first, buffer.untyped_storage(), place.at, place.tensor.nbytes)


def _brought(coming: _Coming, buffer: Tensor) -> list[ParameterState]:
    """A slice with the tensors in the buffer in place of its own."""
    copies: dict[int, dict[str, Tensor]] = {id(each): {} for each in coming.slice_}
    for place in coming.places:
        copies[id(place.of)][place.name] = _on(buffer, place)
    return [_with(copies[id(each)], each) for each in coming.slice_]


def _with(copies: dict[str, Tensor], each: ParameterState) -> ParameterState:
    parameter = copies.get(PARAMETER, each.parameter)
    if parameter is not each.parameter:
        parameter.grad = each.parameter.grad
    state = {**each.state, **{name: copy for name, copy in copies.items() if name != PARAMETER}}
    return replace(each, parameter=parameter, state=state, tensors=copies)


def _take_over(slice_: Iterable[ParameterState], brought: Iterable[ParameterState], versions: Iterable[int]) -> None:
    """Give an optimizer what it has put into a slice's state, but for the copies; and count what it has written."""
    for each, updated, version in zip(slice_, brought, versions, strict=True):
        copies = {id(copy) for copy in updated.tensors.values()}
        each.state.update((name, value) for name, value in updated.state.items() if id(value) not in copies)
        if updated.parameter is not each.parameter and version_of(updated.parameter) > version:
            increment_version(each.parameter)  # fused optimizers count nothing


def _on(buffer: Tensor, place: _Place) -> Tensor:
    """A tensor as it is in DRAM, at its place in the buffer."""
    like = place.tensor
    empty = torch.empty(0, dtype=like.dtype, device=buffer.device)
    return empty.set_(buffer.untyped_storage(), place.at // like.element_size(), like.size(), like.stride())
