"""Makes the steps of optimizers whose state lies in DRAM slice by slice: see `migrator.state`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from torch_tiers.migrator.program.by_parameter import may_be_split, only
from torch_tiers.migrator.runtime.devices import Devices, lanes
from torch_tiers.migrator.runtime.optimizer_steps import Step
from torch_tiers.migrator.runtime.options import Options
from torch_tiers.migrator.state.kept import Kept, in_dram
from torch_tiers.migrator.state.slices import buffer_bytes, cut, may_come
from torch_tiers.migrator.state.stager import Stager
from torch_tiers.migrator.telemetry.counters import Counters

LANES = "state_read", "state_write"


class StagedSteps:
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
        self._stagers: dict[torch.device, Stager] = {}

    def __call__(self, optimizer: Optimizer, step: Step) -> Any:
        """Make a step of an optimizer: first in slices of what lies in DRAM, then of all else at once."""
        staged: list[Kept] = []
        for device, shared in tuple(self._devices.opened.items()):
            lies_in_dram = self.in_dram(device)
            if lies_in_dram is not None and may_be_split(optimizer) and not shared.compute.capturing():
                staged += self._stage(optimizer, step, device, lies_in_dram)
        if not staged:
            return step()
        with only(optimizer, _others(optimizer, staged)):
            return step()

    def in_dram(self, device: torch.device) -> Callable[[Tensor], bool] | None:
        """What tells whether a tensor of a device lies in DRAM, or a part of it; None if no state does."""
        pages = self._options().pages()
        residence = None if pages is None or not pages.state_in_dram else pages.residence(device)
        return None if residence is None else lambda tensor: residence.in_dram(tensor.data_ptr())

    def _stage(
        self, optimizer: Optimizer, step: Step, device: torch.device, lies_in_dram: Callable[[Tensor], bool]
    ) -> list[Kept]:
        """Update what lies in a device's DRAM, and return it."""
        shared = self._devices.opened[device]
        found = in_dram(optimizer, lambda tensor: tensor.device == device and lies_in_dram(tensor))
        kept = [each for each in found if may_come(each.nbytes, shared.budget)]
        if not kept:
            return []
        sizes = [each.nbytes for each in kept]
        buffer = shared.compute.empty(buffer_bytes(sizes, shared.budget))
        if lies_in_dram(buffer):  # HBM is full: to copy from DRAM to DRAM is of no use
            return []

        def update(slice_: Sequence[Kept]) -> None:
            with only(optimizer, _by_group(slice_)):
                step()

        stager = self._stager(device)
        try:
            stager.run(cut(kept, sizes), buffer, update)
        except BaseException:
            del self._stagers[device]
            stager.close()  # before the buffer's memory is anybody else's
            raise
        return kept

    def _stager(self, device: torch.device) -> Stager:
        if device not in self._stagers:
            for name in LANES:
                self._counters.moved.setdefault(name, 0)
            read, write = lanes(device, LANES, self._counters)
            self._stagers[device] = Stager(self._devices.opened[device].compute, read, write)
        return self._stagers[device]

    def close(self) -> None:
        """Wait for copies that are under way."""
        while self._stagers:
            self._stagers.popitem()[1].close()


def _by_group(kept: Sequence[Kept]) -> Mapping[int, list[Tensor]]:
    found: dict[int, list[Tensor]] = {}
    for each in kept:
        found.setdefault(each.group, []).append(each.parameter)
    return found


def _others(optimizer: Optimizer, kept: Sequence[Kept]) -> Mapping[int, list[Tensor]]:
    """All parameters but these."""
    updated = {id(each.parameter) for each in kept}
    return {
        index: [parameter for parameter in group["params"] if id(parameter) not in updated]
        for index, group in enumerate(optimizer.param_groups)
    }
