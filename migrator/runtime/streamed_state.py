"""Makes the steps of optimizers whose state lies in DRAM slice by slice: see `migrator.state`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from torch_tiers.allocator.layout.residence import Residence
from torch_tiers.migrator.program.by_parameter import BY_ELEMENT, Step, may_be_split, step_over
from torch_tiers.migrator.runtime.devices import Device, Devices, lanes
from torch_tiers.migrator.runtime.options import Options
from torch_tiers.migrator.state.chunks import chunks
from torch_tiers.migrator.state.parameter_state import ParameterState, all_but, by_group, those_in_dram
from torch_tiers.migrator.state.slices import AT_ONCE, SLICE, buffer_bytes, cut, may_come, slice_bytes
from torch_tiers.migrator.state.streamer import StateStreamer
from torch_tiers.migrator.telemetry.counters import Counters

STATE_LANES = "state_read", "state_write"


class StreamedState:
    """The optimizer steps of a runtime, for state that the page allocator has put into DRAM.

    Parameters
    ----------
    options : callable
        Returns the runtime's.
    devices : Devices
        Where a device's streams come from.
    counters : Counters
        Of the runtime: what is copied counts as of `STATE_LANES`.
    """

    def __init__(self, options: Callable[[], Options], devices: Devices, counters: Counters) -> None:
        self._options = options
        self._devices = devices
        self._counters = counters
        self._streamers: dict[torch.device, StateStreamer] = {}
        self._opening = threading.Lock()

    def __call__(self, optimizer: Optimizer, step: Step) -> Any:
        """Make a step of an optimizer: first of what lies in DRAM, then of all else, in slices each."""
        found = {device: there for device in tuple(self._devices.opened) if (there := self.residence(device))}
        if not found or not may_be_split(optimizer):
            return step(optimizer)
        streamed = [each for device, there in found.items() for each in self._stream(optimizer, step, device, there)]
        if not streamed:
            return step(optimizer)
        others = list(all_but(optimizer, streamed))
        for slice_ in cut(others, [each.nbytes for each in others], AT_ONCE):
            step_over(by_group(slice_), optimizer, step)
        return None  # as without a closure

    def residence(self, device: torch.device) -> Residence | None:
        """Where state of a device lies, if any lies in DRAM."""
        pages = self._options().pages()
        return None if pages is None or not pages.state_in_dram else pages.residence(device)

    def _stream(
        self, optimizer: Optimizer, step: Step, device: torch.device, residence: Residence
    ) -> list[ParameterState]:
        """Update what lies in a device's DRAM, and return it."""
        shared = self._devices.opened[device]
        if shared.compute.capturing():
            return []
        in_dram: dict[int, int] = {}  # bytes, by address

        def lies_in_dram(tensor: Tensor) -> bool:
            address = tensor.data_ptr()
            in_dram[address] = residence.dram_bytes(address) if tensor.device == device else 0
            return in_dram[address] > 0

        in_parts = [(each, _parts(each, optimizer)) for each in those_in_dram(optimizer, lies_in_dram)]
        in_parts = [
            (each, parts) for each, parts in in_parts if all(may_come(part.nbytes, shared.room) for part in parts)
        ]
        if not in_parts:
            return []
        buffer = _buffer([part.nbytes for _, parts in in_parts for part in parts], shared, residence)
        in_parts = [(each, parts) for each, parts in in_parts if all(part.nbytes <= buffer.numel() for part in parts)]
        states, coming = [each for each, _ in in_parts], [part for _, parts in in_parts for part in parts]

        def update(slice_: Sequence[ParameterState], state: Mapping[Tensor, dict[str, Any]]) -> None:
            step_over(by_group(slice_), optimizer, step, state)

        streamer = self._streamer(device)
        try:
            streamer.run(cut(coming, [each.nbytes for each in coming], slice_bytes(buffer.numel())), buffer, update)
        except BaseException:
            streamer.close()  # before the buffer's memory is anybody else's
            self._streamers.pop(device, None)
            raise
        addresses = [tensor.data_ptr() for each in states for tensor in each.tensors.values()]
        residence.note_streamed({address: in_dram[address] for address in addresses})
        return states

    def _streamer(self, device: torch.device) -> StateStreamer:
        with self._opening:
            if device not in self._streamers:
                for name in STATE_LANES:
                    self._counters.moved.setdefault(name, 0)
                read, write = lanes(device, STATE_LANES, self._counters)
                self._streamers[device] = StateStreamer(self._devices.opened[device].compute, read, write)
            return self._streamers[device]

    def close(self) -> None:
        """Wait for copies that are under way."""
        while self._streamers:
            self._streamers.popitem()[1].close()


def _parts(of: ParameterState, optimizer: Optimizer) -> list[ParameterState]:
    """What of a parameter's state comes at once: no more than a slice, where the optimizer's update allows that."""
    return chunks(of, SLICE) if isinstance(optimizer, BY_ELEMENT) else [of]


def _buffer(sizes: Sequence[int], shared: Device, residence: Residence) -> Tensor:
    """A buffer in HBM for slices of parts with these bytes; an empty one if HBM is full."""
    try:
        whole = shared.compute.empty(buffer_bytes(sizes))
    except torch.OutOfMemoryError:  # in DRAM, too: the optimizer can do without
        return shared.compute.empty(0)
    # To copy from DRAM to DRAM is of no use: what of it came to lie in HBM has to do.
    first, nbytes = residence.longest_in_hbm(whole.data_ptr(), whole.numel())
    return whole[first : first + nbytes]
