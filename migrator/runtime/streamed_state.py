"""Makes the steps of optimizers whose state lies in DRAM slice by slice: see `migrator.state`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from torch_tiers.migrator.program.by_parameter import may_be_split, only
from torch_tiers.migrator.runtime.devices import Devices, lanes
from torch_tiers.migrator.runtime.optimizer_steps import Step
from torch_tiers.migrator.runtime.options import Options
from torch_tiers.migrator.state.kept import Kept, all_but, by_group, in_dram
from torch_tiers.migrator.state.slices import AT_ONCE, SLICE, buffer_bytes, cut, may_come
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
        self._nbytes = WeakIdKeyDictionary()  # that came in the last step, by optimizer, which may compare as it likes

    def __call__(self, optimizer: Optimizer, step: Step) -> Any:
        """Make a step of an optimizer: first of what lies in DRAM, then of all else, in slices each."""
        told = {device: lies for device in tuple(self._devices.opened) if (lies := self.in_dram(device)) is not None}
        if not told or not may_be_split(optimizer):
            return step()
        streamed = [kept for device, lies in told.items() for kept in self._stream(optimizer, step, device, lies)]
        self._nbytes[optimizer] = sum(kept.nbytes for kept in streamed)
        if not streamed:
            return step()
        others = list(all_but(optimizer, streamed))
        for slice_ in cut(others, [kept.nbytes for kept in others], AT_ONCE):
            with only(optimizer, by_group(slice_)):
                step()
        return None  # as without a closure

    @property
    def nbytes(self) -> int:
        """Bytes of state that came to HBM in the last steps of all optimizers."""
        return sum(self._nbytes.values())

    def in_dram(self, device: torch.device) -> Callable[[Tensor], bool] | None:
        """What tells whether a tensor of a device lies in DRAM, or a part of it; None if no state does."""
        pages = self._options().pages()
        residence = None if pages is None or not pages.state_in_dram else pages.residence(device)
        return None if residence is None else lambda tensor: residence.in_dram(tensor.data_ptr())

    def _stream(
        self, optimizer: Optimizer, step: Step, device: torch.device, lies_in_dram: Callable[[Tensor], bool]
    ) -> list[Kept]:
        """Update what lies in a device's DRAM, and return it."""
        shared = self._devices.opened[device]
        if shared.compute.capturing():
            return []
        found = in_dram(optimizer, lambda tensor: tensor.device == device and lies_in_dram(tensor))
        kept = [each for each in found if may_come(each.nbytes, shared.budget)]
        if not kept:
            return []
        slices = list(cut(kept, [each.nbytes for each in kept], SLICE))
        buffer = shared.compute.empty(buffer_bytes([sum(each.nbytes for each in slice_) for slice_ in slices]))
        if lies_in_dram(buffer):  # HBM is full: to copy from DRAM to DRAM is of no use
            return []

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
