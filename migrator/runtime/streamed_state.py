"""Makes the steps of optimizers whose state lies in DRAM slice by slice: see `migrator.state`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from torch_tiers.allocator.layout.residence import Residence
from torch_tiers.migrator.program.by_parameter import may_be_split, only
from torch_tiers.migrator.runtime.devices import Devices, lanes
from torch_tiers.migrator.runtime.optimizer_steps import Step
from torch_tiers.migrator.runtime.options import Options
from torch_tiers.migrator.state.kept import Kept, all_but, by_group, in_dram
from torch_tiers.migrator.state.slices import ABREAST, AT_ONCE, SLICE, buffer_bytes, cut, may_come
from torch_tiers.migrator.state.streamer import StateStreamer
from torch_tiers.migrator.telemetry.counters import Counters

LANES = "state_read", "state_write"


class StreamedState:
    """The optimizer steps of a runtime, for state that the page allocator has put into DRAM.

    Parameters
    ----------
    options : callable
        Returns the runtime's.
    devices : Devices
        Where a device's streams come from.
    counters : Counters
        Of the runtime: what is copied counts as of `LANES`.
    """

    def __init__(self, options: Callable[[], Options], devices: Devices, counters: Counters) -> None:
        self._options = options
        self._devices = devices
        self._counters = counters
        self._streamers: dict[torch.device, StateStreamer] = {}

    def __call__(self, optimizer: Optimizer, step: Step) -> Any:
        """Make a step of an optimizer: first of what lies in DRAM, then of all else, in slices each."""
        found = {device: there for device in tuple(self._devices.opened) if (there := self.residence(device))}
        if not found or not may_be_split(optimizer):
            return step()
        streamed = [
            kept for device, residence in found.items() for kept in self._stream(optimizer, step, device, residence)
        ]
        if not streamed:
            return step()
        others = list(all_but(optimizer, streamed))
        for slice_ in cut(others, [kept.nbytes for kept in others], AT_ONCE):
            with only(optimizer, by_group(slice_)):
                step()
        return None  # as without a closure

    def residence(self, device: torch.device) -> Residence | None:
        """Where state of a device lies, if any lies in DRAM."""
        pages = self._options().pages()
        return None if pages is None or not pages.state_in_dram else pages.residence(device)

    def _stream(self, optimizer: Optimizer, step: Step, device: torch.device, residence: Residence) -> list[Kept]:
        """Update what lies in a device's DRAM, and return it."""
        shared = self._devices.opened[device]
        if shared.compute.capturing():
            return []
        there = in_dram(optimizer, lambda tensor: tensor.device == device and residence.in_dram(tensor.data_ptr()))
        kept = [each for each in there if may_come(each.nbytes, shared.budget)]
        if not kept:
            return []
        slices = list(cut(kept, [each.nbytes for each in kept], SLICE))
        whole = shared.compute.empty(buffer_bytes([sum(each.nbytes for each in slice_) for slice_ in slices]))
        # To copy from DRAM to DRAM is of no use: where HBM was full, what it has of the buffer has to do.
        first, nbytes = residence.longest_in_hbm(whole.data_ptr(), whole.numel())
        if nbytes < whole.numel():
            kept = [each for each in kept if each.nbytes <= nbytes]
            slices = list(cut(kept, [each.nbytes for each in kept], nbytes // ABREAST))
        if not kept:
            return []
        buffer = whole[first : first + nbytes]

        def update(slice_: Sequence[Kept]) -> None:
            with only(optimizer, by_group(slice_)):
                step()

        streamer = self._streamer(device)
        try:
            streamer.run(slices, buffer, update)
        except BaseException:
            del self._streamers[device]
            streamer.close()  # before the buffer's memory is anybody else's
            raise
        return kept

    def _streamer(self, device: torch.device) -> StateStreamer:
        if device not in self._streamers:
            for name in LANES:
                self._counters.moved.setdefault(name, 0)
            read, write = lanes(device, LANES, self._counters)
            self._streamers[device] = StateStreamer(self._devices.opened[device].compute, read, write)
        return self._streamers[device]

    def close(self) -> None:
        """Wait for copies that are under way."""
        while self._streamers:
            self._streamers.popitem()[1].close()
