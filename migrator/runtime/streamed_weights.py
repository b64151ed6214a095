"""Decides which weights of each device are streamed from DRAM, and has them lie there.

On a GPU weights lie in DRAM where the page allocator has put them. On a CPU the budget alone says which are taken to
lie there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial

import torch

from torch_tiers.allocator.layout.residence import Residence
from torch_tiers.allocator.pages import PageAllocator
from torch_tiers.allocator.sizes import MiB, format_size
from torch_tiers.migrator.program import weights as of_program
from torch_tiers.migrator.runtime.devices import Devices, has_tiers, open_lane
from torch_tiers.migrator.runtime.models import Models
from torch_tiers.migrator.runtime.options import Options
from torch_tiers.migrator.telemetry.counters import Counters
from torch_tiers.migrator.weights.placement import buffer_bytes, fit, may_be_streamed
from torch_tiers.migrator.weights.streamer import MakeSubstitutes, Streamer
from torch_tiers.migrator.weights.weight import Weight

log = logging.getLogger("tiers")

LANE = "weights"
ALIGNED = 64  # bytes: as PyTorch's own memory is, and the copies are
LEAST = {"cuda": 4 * MiB, "cpu": 4096}  # bytes: smaller weights stay, as they are many and have few bytes together


class StreamedWeights:
    """The streamers of all devices, and what each of them streams.

    Parameters
    ----------
    options : callable
        Returns the runtime's.
    models : Models
        All that have run.
    devices : Devices
        Where a device's streams come from.
    counters : Counters
        Of the runtime: what is copied counts as of the lane `LANE`.
    moving : callable
        A scope in which weights may move, if what it yields is true.

    Attributes
    ----------
    streamers : dict of torch.device to Streamer
        Replaced as a whole: threads go through it while others choose.
    """

    def __init__(
        self,
        options: Callable[[], Options],
        models: Models,
        devices: Devices,
        counters: Counters,
        moving: Callable[[], AbstractContextManager[bool]],
    ) -> None:
        self.streamers: dict[torch.device, Streamer] = {}
        self._options = options
        self._models = models
        self._devices = devices
        self._counters = counters
        self._moving = moving
        self._substitutes: MakeSubstitutes | None = None
        self._eligible: dict[torch.device, list[Weight]] = {}
        self._asked: dict[torch.device, tuple[frozenset[int], bool]] = {}  # what was chosen from, and for what

    @property
    def are_whole(self) -> bool:
        """Whether none of them was replaced."""
        return all(weight.storage() is not None for each in self._eligible.values() for weight in each)

    def choose(self, *, trains: bool) -> None:
        """Choose which weights of all models are streamed from now on; gradients count if they train."""
        parameters = list(self._models.parameters())
        for device in {tensor.device for tensor in parameters if has_tiers(tensor.device)} | self.streamers.keys():
            if may_lie_in_dram(device, self._options().pages()):
                self._choose(device, [tensor for tensor in parameters if tensor.device == device], trains=trains)

    def _choose(self, device: torch.device, parameters: list[torch.Tensor], *, trains: bool) -> None:
        budget, weights = self._options().hbm(device), _unique(parameters)
        eligible = [
            weight
            for weight, tensor in weights.items()
            if may_be_streamed(weight.nbytes, budget, LEAST[device.type])
            # Kernels choose their code path by alignment. And of what inference mode made nobody counts versions.
            and not (weight.address % ALIGNED or tensor.is_inference())
        ]
        needed = of_program.bytes_on(device, self._models.tensors())  # with buffers
        if trains:
            needed += of_program.bytes_on(device, (tensor for tensor in parameters if tensor.requires_grad))
        chosen = set() if fit(needed, budget) else set(eligible)
        streamer, asked = self.streamers.get(device), (frozenset(weight.identity for weight in eligible), trains)
        if self._asked.get(device) == asked and self.are_whole:
            return  # another outermost module came, of the same weights
        self._asked[device] = asked
        if not chosen:
            self._end(device)  # a model is gone, perhaps, and HBM holds those that are left
            return
        self._eligible[device] = eligible
        if self._substitutes is None:
            self._substitutes = self._options().substitutes()
            if self._substitutes is None:
                return  # to read them where they lie would take far longer than what is gained
        if (residence := self.residence(device)) is not None:
            residence.set_weights(partial(_by_address, eligible))
            with self._moving() as may:
                if may:
                    residence.place([weight.address for weight in chosen], self._others(device, chosen))
        if streamer is None:  # not before there is room for its buffer
            streamer = self._open(
                device, self._substitutes, buffer_bytes([weight.nbytes for weight in eligible], budget)
            )
        if residence is not None:
            with self._moving() as may:
                residence.place((), [streamer.buffer.data_ptr()] if may else ())  # it lies in DRAM where HBM was full
            chosen = {weight for weight in eligible if residence.in_dram(weight.address)}
        streamer.set_weights(_with_tensors(weights, chosen))
        self.streamers = {**self.streamers, device: streamer}
        log.info(
            "%s of weights of %s are streamed from dram, as hbm is %s",
            *(format_size(nbytes) for nbytes in (streamer.nbytes, sum(weight.nbytes for weight in weights), budget)),
        )

    def _others(self, device: torch.device, chosen: Collection[Weight]) -> list[int]:
        """Addresses of all tensors of models but these weights, the smallest first: they are read where they lie."""
        of_models = [tensor.untyped_storage() for tensor in self._models.tensors() if tensor.device == device]
        streamed = {weight.address for weight in chosen}
        others = {(storage.nbytes(), storage.data_ptr()) for storage in of_models}
        return [address for _, address in sorted(others) if address not in streamed]

    def _open(self, device: torch.device, substitutes: MakeSubstitutes, buffer: int) -> Streamer:
        compute = self._devices.open(device, self._options()).compute
        self._counters.moved.setdefault(LANE, 0)
        return Streamer(compute, open_lane(device, LANE, self._counters), substitutes, compute.empty(buffer))

    def residence(self, device: torch.device) -> Residence | None:
        """Where weights of a GPU lie; None without our allocator."""
        pages = self._options().pages()
        return None if pages is None or device.type != "cuda" else pages.residence(device)

    def follow(self, device: torch.device, *, trains: bool) -> None:
        """Stream what lies in DRAM by now. A program that does not train has it changed here, between two forwards."""
        residence, streamer = self.residence(device), self.streamers[device]
        if residence is None:
            return
        if not trains:
            with self._moving() as may:
                if may:
                    residence.pass_over()
        there = {weight.address for weight in self._eligible[device] if residence.in_dram(weight.address)}
        if there != {weight.address for weight in streamer.weights}:
            weights = _unique([tensor for tensor in self._models.parameters() if tensor.device == device])
            streamer.set_weights(_with_tensors(weights, {weight for weight in weights if weight.address in there}))

    def _end(self, device: torch.device) -> None:
        left = dict(self.streamers)
        self._eligible.pop(device, None)
        streamer = left.pop(device, None)
        self.streamers = left
        if streamer is not None:
            streamer.end()
            if (residence := self.residence(device)) is not None:
                residence.set_weights(dict)

    def close(self) -> None:
        """Stream nothing any more; wait for copies that are under way."""
        for device in self.streamers:
            self._end(device)


def may_lie_in_dram(device: torch.device, pages: PageAllocator | None) -> bool:
    """Whether weights of a device may lie in DRAM: PyTorch's allocator for GPUs has no memory there."""
    return device.type != "cuda" or pages is not None


def _unique(tensors: list[torch.Tensor]) -> dict[Weight, torch.Tensor]:
    """A weight for each storage, with one tensor on it."""
    by_storage = {tensor.untyped_storage()._cdata: tensor for tensor in tensors}
    return {Weight(tensor): tensor for tensor in by_storage.values()}


def _with_tensors(
    weights: Mapping[Weight, torch.Tensor], chosen: Collection[Weight]
) -> list[tuple[Weight, torch.Tensor]]:
    return [(weight, tensor) for weight, tensor in weights.items() if weight in chosen]


def _by_address(weights: Iterable[Weight]) -> dict[int, int]:
    return {weight.address: weight.nbytes for weight in weights if weight.storage() is not None}
