"""Puts optimizer state on NVMe for which neither HBM nor DRAM has room, as it is made or loaded."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from torch_tiers.allocator.errors import TierFull, TiersError
from torch_tiers.allocator.pages import PageAllocator, StateRoom
from torch_tiers.allocator.sizes import format_size
from torch_tiers.migrator.program import optimizers
from torch_tiers.migrator.program.by_parameter import BY_ELEMENT, may_be_split
from torch_tiers.migrator.program.subclasses import is_dtensor, own_memory
from torch_tiers.migrator.program.weights import tensors_in
from torch_tiers.migrator.runtime.devices import Devices, state_lanes
from torch_tiers.migrator.runtime.options import Options
from torch_tiers.migrator.runtime.state_room import COPIES
from torch_tiers.migrator.state.nvme_state import NvmeState
from torch_tiers.migrator.state.nvme_tensor import NvmeTensor
from torch_tiers.migrator.state.parameter_state import ParameterState, has_own_storage
from torch_tiers.migrator.state.slices import IN_TRANSIT
from torch_tiers.migrator.telemetry.counters import Counters

log = logging.getLogger("tiers")

# Of a GPU's budget: DRAM that state leaves to what HBM has no room for in an iteration, gaps between blocks included. A
# GPT of 1.3e9 weights in 13.5 GiB needed 1.9 GiB of DRAM, and ended in its third step where it was not left.
SPARE = 1 / 4


@dataclass
class _Excess:
    """How much of an optimizer's state is still to be put on NVMe, for one device.

    Attributes
    ----------
    nbytes : int
        Bytes that are to go; 0 or less: none.
    expected : int
        Bytes of all its state there, with `COPIES` tensors for each parameter.
    is_corrected : bool
        Whether `nbytes` was corrected by what the optimizer made.
    """

    nbytes: int
    expected: int
    is_corrected: bool = False


class NvmePlacement:
    """State of a runtime's optimizers on NVMe.

    Parameters
    ----------
    options : callable
        Returns the runtime's.
    devices : Devices
        Where the store comes from, and a device's streams.
    counters : Counters
        Of the runtime: what is copied counts as of `state_lanes`.

    Attributes
    ----------
    states : dict of device to NvmeState
        Those devices of which state was ever put there.
    """

    def __init__(self, options: Callable[[], Options], devices: Devices, counters: Counters) -> None:
        self._options = options
        self._devices = devices
        self._counters = counters
        self.states: dict[torch.device, NvmeState] = {}
        self._excess = WeakIdKeyDictionary()  # by optimizer, which may compare as it likes: by device
        self._warned = False
        self._opening = threading.Lock()

    def expect(self, optimizer: Optimizer, pages: PageAllocator, rooms: Mapping[int, StateRoom]) -> None:
        """Estimate how much of the state that an optimizer is about to make or load has to go to NVMe.

        DRAM is left for its transfers, and for iterations. `rooms` is the room for state by GPU.
        """
        self._excess.pop(optimizer, None)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        may_go = type(optimizer) in BY_ELEMENT and may_be_split(optimizer) and not any(map(is_dtensor, parameters))
        beyond = pages.state_without_room(rooms) if may_go else {}
        if not beyond or not self._devices.backing(self._options()).has_disk:
            return
        found = {}
        for device in {parameter.device for parameter in parameters}:
            if device.index in beyond:
                reserved = IN_TRANSIT + int(SPARE * pages.limit(device))
                nbytes = beyond[device.index] + pages.release_dram(device.index, reserved)
                found[device] = _Excess(nbytes, rooms[device.index].expected)
        self._excess[optimizer] = found

    @property
    def nbytes(self) -> int:
        """Bytes of state on NVMe."""
        return sum(state.nbytes for state in self.states.values())

    def lacks_room(self, optimizer: Optimizer) -> bool:
        """Whether state that an optimizer makes is to be put on NVMe."""
        return any(excess.nbytes > 0 for excess in self._excess.get(optimizer, {}).values())

    def put(self, optimizer: Optimizer, states: Sequence[ParameterState]) -> None:
        """Put the state on NVMe that an optimizer has just made for these parameters, as far as it has no room."""
        made = [(each.parameter, optimizer.state.get(each.parameter, {})) for each in states]
        for device, excess in self._excess.get(optimizer, {}).items():
            if made and not excess.is_corrected:
                excess.is_corrected = True
                usual = COPIES * sum(parameter.nbytes for parameter, _ in made)
                nbytes = sum(tensor.nbytes for _, state in made for tensor in tensors_in(state))
                excess.nbytes -= int(excess.expected * (1 - nbytes / max(1, usual)))
            for parameter, state in made:
                for name, value in state.items():
                    state[name] = self._put(excess, device, parameter, value)

    def put_loaded(self, optimizer: Optimizer, parameter: Tensor, value: Tensor) -> Tensor:
        """Return a tensor of state that an optimizer loads, which is put on NVMe if it has no room."""
        for device, excess in self._excess.get(optimizer, {}).items():
            value = self._put(excess, device, parameter, value)
        return value

    def _put(self, excess: _Excess, device: torch.device, parameter: Tensor, value: Tensor) -> Tensor:
        """A tensor of state, or what stands for it on NVMe."""
        if isinstance(value, NvmeTensor) and value.contents.restored is not None:
            value = value.contents.restored
        if excess.nbytes <= 0 or not _may_go(parameter, value) or value.device != device:
            return value
        try:
            stored = self._open(device).put(value)
        except TierFull as full:
            excess.nbytes = 0
            if not self._warned:
                self._warned = True
                log.warning("%s; optimizer state that it has no room for stays in hbm and dram", str(full))
            return value
        excess.nbytes -= value.nbytes
        return stored

    def _open(self, device: torch.device) -> NvmeState:
        options = self._options()
        shared, backing = self._devices.open(device, options), self._devices.backing(options)
        with self._opening:
            if device not in self.states:
                lanes = state_lanes(device, self._counters)
                self.states[device] = NvmeState(shared.compute, *lanes, backing, self._counters)
            return self.states[device]

    def bring_back(self) -> None:
        """Restore all state to device memory, as far as there is room: the session is about to end."""
        if not self.nbytes:
            return
        log.info("bringing %s of optimizer state back from nvme", format_size(self.nbytes))
        try:
            for optimizer in optimizers.all_alive():
                for state in optimizer.state.values():
                    for name, value in state.items():
                        if isinstance(value, NvmeTensor) and any(map(value.contents.lies_in, self.states.values())):
                            state[name] = value.contents.restore()
        except (torch.OutOfMemoryError, TiersError) as error:
            log.warning(
                "optimizer state that lies on nvme is lost with the session, as it cannot be brought back: %s. Save it "
                "within the session",
                error,
            )

    def close(self) -> None:
        """Wait for copies that are under way."""
        for state in self.states.values():
            state.close()


def _may_go(parameter: Tensor, value: object) -> bool:
    """Whether a value of state is a tensor that may come back in parts, each with its part of the parameter."""
    return (
        isinstance(value, Tensor)
        and own_memory(value) is value  # which that of an `NvmeTensor` is not
        and own_memory(parameter) is parameter
        and value.size() == parameter.size()
        and value.is_contiguous()
        and parameter.is_contiguous()
        and has_own_storage(value)
    )
