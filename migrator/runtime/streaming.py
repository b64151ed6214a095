"""Decides which weights are streamed from DRAM, and tells the streamers where forwards and backwards begin and end."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from torch_tiers.allocator.layout.residence import Residence
from torch_tiers.allocator.pages import PageAllocator
from torch_tiers.allocator.sizes import MiB, format_size
from torch_tiers.migrator.program import weights as of_program
from torch_tiers.migrator.runtime.devices import Devices, has_tiers, open_lane
from torch_tiers.migrator.runtime.models import Models
from torch_tiers.migrator.runtime.options import Options
from torch_tiers.migrator.telemetry.counters import Counters
from torch_tiers.migrator.weights.placement import buffer_bytes, may_be_streamed, to_stream
from torch_tiers.migrator.weights.streamer import MakeSubstitutes, Streamer
from torch_tiers.migrator.weights.weight import Weight

log = logging.getLogger("tiers")

LANE = "weights"
LEAST = {"cuda": 4 * MiB, "cpu": 4096}  # bytes: smaller weights stay, as they are many and have few bytes together


_graph_task = torch._C._current_graph_task_id


class _Thread(threading.local):
    root: int | None = None  # the model that it is within, without hooks


class Streaming:
    """The streamed weights of all devices.

    On a GPU weights lie in DRAM where the page allocator has put them. Without one the budget alone says which are
    taken to lie there.

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
    others : callable
        Returns the number of other threads that train.
    """

    def __init__(
        self,
        options: Callable[[], Options],
        models: Models,
        devices: Devices,
        counters: Counters,
        others: Callable[[], int],
    ) -> None:
        self._options = options
        self._models = models
        self._devices = devices
        self._substitutes: MakeSubstitutes | None = None
        self._streamers: dict[torch.device, Streamer] = {}
        self._eligible: dict[torch.device, list[Weight]] = {}
        self._asked: dict[torch.device, tuple[Mapping[int, int], bool]] = {}  # what was chosen from, and for what
        self._counters = counters
        self._others = others
        self._thread = _Thread()
        self._within = 0  # threads that are within a model, without hooks
        self._lock = threading.Lock()  # guards that number
        self._pass_over = True  # of training

    @property
    def active(self) -> bool:
        """Whether any weights are streamed."""
        return bool(self._streamers)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights that are streamed."""
        return sum(streamer.nbytes for streamer in self._streamers.values())

    def beside(self, device: torch.device) -> int:
        """Bytes of streamed weights, which need no HBM, less those of the buffer for their copies."""
        streamer = self._streamers.get(device)
        return 0 if streamer is None else streamer.nbytes - streamer.buffer.numel()

    # ------------------------------------------------------------------------------- what is streamed

    def _look(self, *, trains: bool) -> None:
        parameters = list(self._models.parameters())
        for device in {tensor.device for tensor in parameters if has_tiers(tensor.device)}:
            if may_lie_in_dram(device, self._options().pages()):
                self._choose(device, [tensor for tensor in parameters if tensor.device == device], trains=trains)

    def _choose(self, device: torch.device, parameters: list[torch.Tensor], *, trains: bool) -> None:
        budget, weights = self._options().hbm(device), _unique(parameters)
        eligible = [weight for weight in weights if may_be_streamed(weight.nbytes, budget, LEAST[device.type])]
        sizes = [weight.nbytes for weight in eligible]
        fixed = of_program.bytes_on(device, self._models.tensors()) - sum(sizes)  # with buffers
        if trains:
            fixed += of_program.bytes_on(device, (tensor for tensor in parameters if tensor.requires_grad))
        chosen = {eligible[place] for place in to_stream(sizes, fixed, budget)}
        streamer, asked = self._streamers.get(device), (_by_address(eligible), trains)
        if (not chosen and streamer is None) or self._asked.get(device) == asked:
            return  # another outermost module came, of the same weights
        self._eligible[device] = eligible
        residence = self._residence(device)
        if residence is not None:
            residence.weights = partial(_by_address, eligible)
            if self._is_alone:
                stay = (weight.address for weight in eligible if weight not in chosen)
                residence.place([weight.address for weight in chosen], stay)
        if not chosen and streamer is not None:  # a model is gone, and HBM holds those that are left
            self._streamers.pop(device).end()
            return
        if streamer is None:
            streamer = self._open(device, buffer_bytes(sizes, budget))  # once there is room for its buffer
        if streamer is None:
            return
        if residence is not None:
            residence.place((), [streamer.buffer.data_ptr()])  # where HBM was full it lies in DRAM
            chosen = {weight for weight in eligible if residence.in_dram(weight.address)}
        streamer.stream(_with_tensors(weights, chosen))
        self._streamers[device], self._asked[device] = streamer, asked
        log.info(
            "%s of weights of %s are streamed from dram, as hbm is %s",
            *(format_size(nbytes) for nbytes in (streamer.nbytes, sum(weight.nbytes for weight in weights), budget)),
        )

    @property
    def _is_alone(self) -> bool:
        """Whether no other thread's kernels may read weights, which are mapped nowhere while they move."""
        return self._others() == 0 and self._within == (self._thread.root is not None)

    def _open(self, device: torch.device, buffer: int) -> Streamer | None:
        if self._substitutes is None:
            self._substitutes = self._options().substitutes()
            if self._substitutes is None:
                return None
        compute = self._devices.open(device, self._options()).compute
        self._counters.moved.setdefault(LANE, 0)
        lane = open_lane(device, LANE, self._counters)
        return Streamer(compute, lane, self._substitutes, compute.empty(buffer))

    def _residence(self, device: torch.device) -> Residence | None:
        pages = self._options().pages()
        return None if pages is None or device.type != "cuda" else pages.residence(device)

    def _follow(self, device: torch.device, residence: Residence) -> None:
        """Stream what lies in DRAM by now."""
        there = {weight.address for weight in self._eligible[device] if residence.in_dram(weight.address)}
        streamer = self._streamers[device]
        if there != {weight.address for weight in streamer.weights}:
            weights = _unique([tensor for tensor in self._models.parameters() if tensor.device == device])
            streamer.stream(_with_tensors(weights, {weight for weight in weights if weight.address in there}))

    # ------------------------------------------------------------------------------- begins and ends

    def enter(self, module: nn.Module) -> bool:
        """A module is called in a thread without hooks; return whether `leave` is to be called when it ends."""
        thread = self._thread
        # Of one whose end an interrupt has kept from us the next call is a new one.
        if (thread.root is not None and thread.root != id(module)) or _is_no_pass():
            return False
        self.see(module)
        if not self.active:
            return False
        if thread.root is None:
            with self._lock:
                self._within += 1
            thread.root = id(module)
        self.forward_begins(module)
        return True

    def leave(self, *, outermost: bool) -> None:
        """The call of a module has ended in this thread, perhaps of one that no other has called."""
        if not outermost or _graph_task() != -1:
            return
        if self._thread.root is not None:
            self._thread.root = None
            with self._lock:
                self._within -= 1
        self._close()

    def see(self, module: nn.Module) -> bool:
        """Choose what is streamed, if this outermost module is new, or trains for the first time; whether it is."""
        trains = torch.is_grad_enabled()
        is_new = self._models.add(module, trains=trains)
        if is_new:
            try:
                self._look(trains=trains)
            except BaseException:  # an interrupt, perhaps
                self._models.forget(module)
                raise
        return is_new

    def forward_begins(self, root: nn.Module) -> None:
        """The forward of an outermost module begins in this thread."""
        if not self.active or _is_capturing():
            return
        trains = torch.is_grad_enabled()
        begins = not trains or self._pass_over
        if begins and any(weight.storage() is None for each in self._eligible.values() for weight in each):
            self._look(trains=trains)  # some were replaced
        for device, streamer in list(self._streamers.items()):
            streamer.close()
            if begins:
                self._settle(device, trains=trains)
                streamer.begin("step" if trains else id(root))
            streamer.open()
        self._pass_over &= not trains

    def backward_begins(self) -> None:
        """A backward begins in this thread, perhaps within another."""
        if self.active and _graph_task() == -1:
            for streamer in self._streamers.values():
                streamer.open()

    def backward_over(self) -> None:
        """It has ended, also when it raised."""
        if self.active and _graph_task() == -1:
            self._close()

    def stepping(self) -> None:
        """An optimizer is about to step, perhaps within a backward."""
        if self.active and _graph_task() == -1:
            self._close()

    def stepped(self) -> None:
        """The optimizer has stepped that ends a pass."""
        self._pass_over = True

    def _close(self) -> None:
        for streamer in self._streamers.values():
            streamer.close()

    def _settle(self, device: torch.device, *, trains: bool) -> None:
        pages, residence = self._options().pages(), self._residence(device)
        if pages is not None and residence is not None:
            if not trains and self._is_alone:  # the allocator does so itself at the end of a step
                pages.settle(device)
            self._follow(device, residence)

    def forked(self) -> None:
        """Give up in a forked child process: weights are read where they lie."""
        self._streamers = {}

    def close(self) -> None:
        """Stream nothing any more; wait for copies that are under way."""
        for device, streamer in self._streamers.items():
            streamer.end()
            if (residence := self._residence(device)) is not None:
                residence.weights = dict
        self._streamers.clear()


def may_lie_in_dram(device: torch.device, pages: PageAllocator | None) -> bool:
    """Whether weights of a device may lie in DRAM: PyTorch's allocator has no memory there."""
    return device.type != "cuda" or pages is not None


def _is_capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _is_no_pass() -> bool:
    """Whether what runs now is part of a backward, of a transform of `torch.func`, or goes into a graph."""
    func: Any = torch._C._functorch
    return _graph_task() != -1 or func.peek_interpreter_stack() is not None or _is_capturing()


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
