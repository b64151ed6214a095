"""Makes steps slice by slice for optimizers whose state lies in DRAM or on NVMe: see `migrator.state`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import compress
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from torch_tiers.allocator.layout.residence import Residence
from torch_tiers.migrator.program.by_parameter import BY_ELEMENT, Step, makes_state, may_be_split, step_over
from torch_tiers.migrator.program.subclasses import is_dtensor, own_memory
from torch_tiers.migrator.runtime.devices import Device, Devices, state_lanes
from torch_tiers.migrator.runtime.nvme_placement import NvmePlacement
from torch_tiers.migrator.runtime.options import Options
from torch_tiers.migrator.runtime.state_room import COPIES
from torch_tiers.migrator.state import parameter_state
from torch_tiers.migrator.state.chunks import chunks
from torch_tiers.migrator.state.nvme_slices import NvmeSlices, comes_in_parts, parts_on_nvme, unwrap_restored
from torch_tiers.migrator.state.nvme_state import NvmeState
from torch_tiers.migrator.state.parameter_state import (
    ParameterState,
    all_but,
    all_states,
    by_group,
    those_in_dram,
    version_of,
)
from torch_tiers.migrator.state.slices import AT_ONCE, SLICE, buffer_bytes, cut, largest, slice_bytes
from torch_tiers.migrator.state.streamer import StateStreamer
from torch_tiers.migrator.telemetry.counters import Counters


class StreamedState:
    """The optimizer steps of a runtime, for state that does not lie in HBM.

    Parameters
    ----------
    options : callable
        Returns the runtime's.
    devices : Devices
        Where a device's streams come from.
    counters : Counters
        Of the runtime: what is copied counts as of `state_lanes`.
    masters : callable
        Returns the identities of an optimizer's master weights.
    nvme : NvmePlacement
        Has the state that lies on NVMe.
    """

    def __init__(
        self,
        options: Callable[[], Options],
        devices: Devices,
        counters: Counters,
        masters: Callable[[Optimizer], frozenset[int]],
        nvme: NvmePlacement,
    ) -> None:
        self._nvme = nvme
        self._options = options
        self._devices = devices
        self._counters = counters
        self._masters = masters
        self._streamers: dict[torch.device, StateStreamer] = {}
        self._opening = threading.Lock()

    def __call__(self, optimizer: Optimizer, step: Step) -> Any:
        """Make a step, in slices: over parameters whose state lies on NVMe, those whose lies in DRAM, and all others.

        State that is made goes to NVMe as far as it has no room.
        """
        found = {device: there for device in tuple(self._devices.opened) if (there := self.residence(device))}
        lacks_room = self._nvme.lacks_room(optimizer)
        if not (found or lacks_room or self._nvme.states) or not may_be_split(optimizer):
            return step(optimizer)
        states = list(all_states(optimizer, self._masters(optimizer)))
        streamed = list[ParameterState]()
        for device, nvme in tuple(self._nvme.states.items()):
            with nvme.stepping():
                streamed += self._stream_from_nvme(optimizer, step, states, device, nvme)
        others = list(all_but(states, streamed))
        streamed += [each for on in found.items() for each in self._stream(optimizer, step, others, *on)]
        if not (streamed or lacks_room):
            return step(optimizer)
        others = list(all_but(others, streamed))
        for slice_ in cut(others, [each.nbytes or COPIES * each.parameter.nbytes for each in others], AT_ONCE):
            making = [each for each in slice_ if lacks_room and makes_state(optimizer, each.group, each.state)]
            step_over(by_group(slice_), optimizer, step)
            if making:
                self._nvme.put(optimizer, making)
        return None  # as without a closure

    def residence(self, device: torch.device) -> Residence | None:
        """Where state of a device lies, if any lies in DRAM."""
        pages = self._options().pages()
        return None if pages is None or not pages.state_in_dram else pages.residence(device)

    def _stream(
        self,
        optimizer: Optimizer,
        step: Step,
        states: Sequence[ParameterState],
        device: torch.device,
        residence: Residence,
    ) -> list[ParameterState]:
        """Update those of these parameters whose state comes from a device's DRAM, and return their state."""
        shared = self._devices.opened[device]
        if shared.compute.capturing():
            return []
        in_dram: dict[int, int] = {}  # bytes, by address

        def lies_in_dram(tensor: Tensor) -> bool:
            address = tensor.data_ptr()
            in_dram[address] = residence.dram_bytes(address) if tensor.device == device else 0
            return in_dram[address] > 0

        whole = (each for each in states if not makes_state(optimizer, each.group, each.state))
        found = list(those_in_dram(whole, lies_in_dram))
        parts = _parts(found, optimizer, SLICE, largest(shared.room))
        if not any(parts):
            return []
        buffer = _buffer([part.nbytes for of in parts for part in of], shared, residence)
        most = slice_bytes(buffer.numel())
        if most < parameter_state.LEAST:  # a copy of less takes no less time
            return []
        largest_part = max(part.nbytes for of in parts for part in of)
        if most < SLICE or buffer.numel() < largest_part:  # few bytes come, or a part of the buffer lies in DRAM
            parts = _parts(found, optimizer, most, buffer.numel())
        streamed, coming = list(compress(found, parts)), [part for of in parts for part in of]
        distributed = (each.parameter for each in streamed if is_dtensor(each.parameter))
        shards = [(each, shard, version_of(shard)) for each in distributed if (shard := own_memory(each)) is not None]

        with self._streamer(device) as streamer:
            streamer.run(cut(coming, [each.nbytes for each in coming], most), buffer, partial(_update, optimizer, step))
        for parameter, shard, version in shards:
            if version_of(shard) > version:
                increment_version(parameter)  # whose own count PyTorch looks at
        addresses = [tensor.data_ptr() for each in streamed for tensor in each.tensors.values()]
        residence.note_streamed({address: in_dram[address] for address in addresses})
        return streamed

    def _stream_from_nvme(
        self, optimizer: Optimizer, step: Step, states: Sequence[ParameterState], device: torch.device, nvme: NvmeState
    ) -> list[ParameterState]:
        """Update those of these parameters whose state lies on NVMe, and return their state."""
        compute = self._devices.opened[device].compute
        for each in states:
            unwrap_restored(each)
        stored = [each for each in states if each.parameter.device == device and comes_in_parts(each, nvme)]
        if not stored or compute.capturing():
            return []
        coming = [part for each in stored for part in parts_on_nvme(each)]
        sizes = [part.nbytes for part in coming]
        try:
            buffer = compute.empty(buffer_bytes(sizes))
        except torch.OutOfMemoryError:  # one slice after the other, then
            buffer = compute.empty(max(sizes))
        slices = NvmeSlices(cut(coming, sizes, min(SLICE, buffer.numel())), nvme)
        try:
            with self._streamer(device) as streamer:
                streamer.run(slices, buffer, partial(_update, optimizer, step), slices.written_back)
        finally:
            slices.close(compute.mark(compute.stream()))
        return stored

    @contextmanager
    def _streamer(self, device: torch.device) -> Iterator[StateStreamer]:
        """The streamer of a device, which is closed before its buffer's memory is anybody else's if it fails."""
        with self._opening:
            if device not in self._streamers:
                lanes = state_lanes(device, self._counters)
                self._streamers[device] = StateStreamer(self._devices.opened[device].compute, *lanes)
            streamer = self._streamers[device]
        try:
            yield streamer
        except BaseException:
            streamer.close()
            self._streamers.pop(device, None)
            raise

    def close(self) -> None:
        """Wait for copies that are under way."""
        while self._streamers:
            self._streamers.popitem()[1].close()


def _update(optimizer: Optimizer, step: Step, slice_: Sequence[ParameterState]) -> None:
    step_over(by_group(slice_), optimizer, step, {each.parameter: each.state for each in slice_})


def _parts(states: Sequence[ParameterState], optimizer: Optimizer, most: int, limit: int) -> list[list[ParameterState]]:
    """For each of these the parts that come one after the other; none if one would take more bytes than the limit.

    Chunks of at most so many bytes, if the optimizer updates each number by itself.
    """
    parts = [chunks(each, most) if type(optimizer) in BY_ELEMENT else [each] for each in states]
    return [of if all(part.nbytes <= limit for part in of) else [] for of in parts]


def _buffer(sizes: Sequence[int], shared: Device, residence: Residence) -> Tensor:
    """A buffer in HBM for slices of parts with these bytes; an empty one if HBM is full."""
    try:
        whole = shared.compute.empty(buffer_bytes(sizes))
    except torch.OutOfMemoryError:  # in DRAM, too: the optimizer can do without
        return shared.compute.empty(0)
    # To copy from DRAM to DRAM is of no use: what of it came to lie in HBM has to do.
    first, nbytes = residence.longest_in_hbm(whole.data_ptr(), whole.numel())
    return whole[first : first + nbytes]
