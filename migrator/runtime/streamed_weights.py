"""Decides which weights of each device are streamed from DRAM, and has them lie there.

On a GPU weights lie in DRAM where the page allocator has put them. On a CPU the budget alone says which are taken to
lie there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack
from functools import cache, partial

import torch
from torch import Tensor

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
        self._substitutes = cache(lambda: options().substitutes())  # which takes long, and may be refused
        # Frozen weights that give way to all else, for which no plan fits: by identity.
        self._giving_way: dict[torch.device, set[int]] = {}
        self._eligible: dict[torch.device, list[Weight]] = {}  # that may be streamed
        self._streamed: dict[torch.device, set[Weight]] = {}  # of these, what the streamers were given

    @property
    def are_whole(self) -> bool:
        """Whether none of them is gone."""
        return all(weight.storage() is not None for each in self._eligible.values() for weight in each)

    def choose(self) -> None:
        """Choose which weights of all models are streamed from now on."""
        found = self._by_device()
        for device in found.keys() | self.streamers.keys():
            if may_lie_in_dram(device, self._options().pages()):
                self._choose(device, found.get(device, {}))

    def give_way(self, device: torch.device, nbytes: int) -> bool:
        """Have the frozen weights of a device streamed from the next choice on; return whether they are then.

        They are if that leaves half of `nbytes` or more. Weights that train are not: optimizers write them, and their
        state gives way before.
        """
        if device in self._giving_way:  # of several threads another has asked
            return True
        if device in self.streamers or not may_lie_in_dram(device, self._options().pages()):
            return False
        frozen = self._frozen(device, self._by_device().get(device, {}))
        sizes = [weight.nbytes for weight in frozen]
        if 2 * (sum(sizes) - buffer_bytes(sizes, self._options().hbm(device))) < nbytes:
            return False
        self._giving_way[device] = _identities(frozen)
        return True

    def give_way_no_more(self) -> None:
        """Choose by what weights take alone, until somebody says again that no plan fits."""
        self._giving_way.clear()

    def _frozen(self, device: torch.device, weights: Mapping[Weight, Tensor]) -> list[Weight]:
        return [weight for weight in self._may_be(device, weights) if not weights[weight].requires_grad]

    def _may_be(self, device: torch.device, weights: Mapping[Weight, Tensor]) -> list[Weight]:
        """Return the weights that may be streamed."""
        budget = self._options().hbm(device)
        return [
            weight
            for weight, tensor in weights.items()
            if may_be_streamed(weight.nbytes, budget, LEAST[device.type])
            # Kernels choose their code path by alignment. And of what inference mode made nobody counts versions.
            and not (weight.address % ALIGNED or tensor.is_inference())
        ]

    def _by_device(self) -> dict[torch.device, dict[Weight, Tensor]]:
        """A weight for each storage that parameters of models have, with one tensor on it."""
        found: dict[torch.device, dict[Weight, Tensor]] = {}
        known = set[int]()
        for tensor in self._models.parameters():
            if has_tiers(tensor.device) and (identity := tensor.untyped_storage()._cdata) not in known:
                known.add(identity)
                found.setdefault(tensor.device, {})[Weight(tensor)] = tensor
        return found

    def _choose(self, device: torch.device, weights: Mapping[Weight, Tensor]) -> None:
        budget = self._options().hbm(device)
        needed = of_program.bytes_on(device, self._models.tensors())  # with buffers
        needed += of_program.bytes_on(device, self._models.trained())  # their gradients
        if fit(needed, budget):
            giving_way = self._giving_way.get(device, set())
            eligible = [weight for weight in self._frozen(device, weights) if weight.identity in giving_way]
        else:
            eligible = self._may_be(device, weights)
        if not eligible:
            self._giving_way.pop(device, None)
            self._end(device, promote=True)  # a model is gone, perhaps, and HBM holds those that are left
            return
        if _identities(eligible) == _identities(self._eligible.get(device, ())) and self.are_whole:
            return  # another outermost module came, of the same weights
        if (substitutes := self._substitutes()) is None:
            return  # to read them where they lie would take far longer than what is gained
        if (residence := self.residence(device)) is not None:
            residence.set_weights(partial(_by_address, eligible))
            with self._moving() as may:
                if may:
                    residence.place([weight.address for weight in eligible], self._others(device, eligible))
        self._open(device, substitutes, buffer_bytes([weight.nbytes for weight in eligible], budget))
        self._stream(device, eligible, weights)
        self._eligible[device] = eligible  # last: after an interrupt all of it is done again
        log.info(
            "%s of weights of %s are streamed from dram, as hbm is %s",
            format_size(self.streamers[device].nbytes),
            format_size(sum(weight.nbytes for weight in weights)),
            format_size(budget),
        )

    def _open(self, device: torch.device, substitutes: MakeSubstitutes, buffer: int) -> None:
        """Open a streamer, unless there is one with a buffer of that size, once there is room for it."""
        streamer = self.streamers.get(device)
        if streamer is not None:
            if streamer.buffer.numel() >= buffer:
                return
            streamer.end()
        compute = self._devices.open(device, self._options()).compute
        self._counters.moved.setdefault(LANE, 0)
        streamer = Streamer(compute, open_lane(device, LANE, self._counters), substitutes, compute.empty(buffer))
        self._streamed.pop(device, None)
        self.streamers = {**self.streamers, device: streamer}
        if (residence := self.residence(device)) is not None:
            with self._moving() as may:
                residence.place((), [streamer.buffer.data_ptr()] if may else ())  # it lies in DRAM where HBM was full

    def _stream(self, device: torch.device, eligible: Iterable[Weight], weights: Mapping[Weight, Tensor]) -> None:
        """Stream those of the eligible weights that lie in DRAM, with a tensor on each of `weights`."""
        there = self._in_dram(device, eligible)
        tensors = {weight.identity: tensor for weight, tensor in weights.items()}
        known = [(weight, tensors[weight.identity]) for weight in there if weight.identity in tensors]
        self.streamers[device].set_weights(known)
        self._streamed[device] = set(there)

    def _in_dram(self, device: torch.device, eligible: Iterable[Weight]) -> list[Weight]:
        residence = self.residence(device)
        return [weight for weight in eligible if residence is None or residence.in_dram(weight.address)]

    def _others(self, device: torch.device, weights: Iterable[Weight]) -> list[int]:
        """Addresses of all tensors of models but these weights, the smallest first: they are read where they lie."""
        of_models = [tensor.untyped_storage() for tensor in self._models.tensors() if tensor.device == device]
        streamed = {weight.address for weight in weights}
        others = {(storage.nbytes(), storage.data_ptr()) for storage in of_models}
        return [address for _, address in sorted(others) if address not in streamed]

    def residence(self, device: torch.device) -> Residence | None:
        """Where weights of a GPU lie; None without our allocator."""
        pages = self._options().pages()
        return None if pages is None or device.type != "cuda" else pages.residence(device)

    def follow(self, device: torch.device, *, may_move: bool) -> None:
        """Stream what lies in DRAM by now, which is changed here first if it may be: between two forwards."""
        residence = self.residence(device)
        if residence is None or device not in self._eligible:
            return
        if may_move:
            with self._moving() as may:
                if may:
                    residence.pass_over()
        eligible = self._eligible[device]
        if set(self._in_dram(device, eligible)) != self._streamed.get(device):
            self._stream(device, eligible, self._by_device().get(device, {}))

    def drain(self) -> None:
        """Let go of the weights that were copied, as their model is gone; wait for the copies."""
        for streamer in self.streamers.values():
            streamer.drain()

    def _end(self, device: torch.device, *, promote: bool = False) -> None:
        """Stream nothing of a device any more, and have what lies in DRAM come back as far as there is room."""
        left, eligible = dict(self.streamers), self._eligible.pop(device, [])
        self._streamed.pop(device, None)
        streamer = left.pop(device, None)
        self.streamers = left
        if streamer is None:
            return
        streamer.end()
        residence = self.residence(device)
        if residence is not None:
            residence.set_weights(dict)
            with self._moving() as may:
                if may and promote:
                    residence.place((), _by_address(eligible))

    def close(self) -> None:
        """Stream nothing any more; wait for copies that are under way."""
        with ExitStack() as stack:
            for device in self.streamers:
                stack.callback(self._end, device)


def may_lie_in_dram(device: torch.device, pages: PageAllocator | None) -> bool:
    """Whether weights of a device may lie in DRAM: PyTorch's allocator for GPUs has no memory there."""
    return device.type != "cuda" or pages is not None


def _identities(weights: Iterable[Weight]) -> set[int]:
    return {weight.identity for weight in weights}


def _by_address(weights: Iterable[Weight]) -> dict[int, int]:
    return {weight.address: weight.nbytes for weight in weights if weight.storage() is not None}
