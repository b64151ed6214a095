"""Has optimizer state lie where there is room for it: as it is made or loaded, and once an iteration was recorded."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from torch_tiers.allocator.layout.residence import Residence
from torch_tiers.allocator.pages import PageAllocator, StateRoom
from torch_tiers.migrator.program import optimizers, weights
from torch_tiers.migrator.program.by_parameter import may_be_split
from torch_tiers.migrator.program.master_weights import ModelWeights, master_weights
from torch_tiers.migrator.runtime.nvme_placement import NvmePlacement
from torch_tiers.migrator.runtime.optimizer_loads import ReplaceLoaded
from torch_tiers.migrator.runtime.savers import Savers
from torch_tiers.migrator.runtime.state_room import (
    copies_in,
    rooms_before_training,
    shortages,
    shortages_before_training,
    state_rooms,
)
from torch_tiers.migrator.state.parameter_state import has_own_storage

log = logging.getLogger("tiers")

FIRST_STEPS = 3  # steps after which an optimizer has made its state


class _Thread(threading.local):
    makes_state = False  # whether what it allocates is state


class PlacedState:
    """The state of a runtime's optimizers.

    Parameters
    ----------
    pages : callable
        Returns the page allocator, if it is PyTorch's.
    savers : Savers
        Know what an iteration needs, once one is recorded.
    moving : callable
        A scope in which state may move, if it yields True.
    parameters : callable
        Returns the parameters of all models that have run.
    nvme : NvmePlacement
        Is told of state for which DRAM has no room.
    """

    def __init__(
        self,
        pages: Callable[[], PageAllocator | None],
        savers: Savers,
        moving: Callable[[], AbstractContextManager[bool]],
        parameters: Callable[[], Iterable[Tensor]],
        nvme: NvmePlacement,
    ) -> None:
        self._nvme = nvme
        self._pages = pages
        self._savers = savers
        self._moving = moving
        self._known = WeakIdKeyDictionary()  # optimizers that have stepped, which may compare as they like
        self._placed = WeakIdKeyDictionary()  # those that have done so while an iteration was recorded
        self._parameters = parameters
        # As they were after so many steps: there may be an optimizer for each of them.
        self._model_weights, self._steps = ModelWeights.among(()), -1
        # By optimizer, the identities of its master weights. PyTorch swaps no tensors that have weak references.
        self._masters = WeakIdKeyDictionary()
        self._thread = _Thread()
        self._steps_in_backward = False  # then what comes to HBM for a step needs room while saved tensors are there
        self._to_demote: dict[torch.device, int] = {}  # bytes, when the next forward begins

    def stepping(self, optimizer: Optimizer, steps: int) -> None:
        """An optimizer begins a step, after so many of the program: it may make its state."""
        pages = self._pages()
        self._steps_in_backward |= torch._C._current_graph_task_id() != -1
        if pages is None:
            return
        rooms = {} if optimizer in self._placed else state_rooms(optimizer, self._savers.thread.saver)
        # What was loaded, or made before, makes room.
        if rooms and self._make_room(pages, optimizer, steps):
            self._placed[optimizer] = True
        if optimizer not in self._known or steps < FIRST_STEPS:
            self._begin(pages, rooms)
            if rooms and not any(optimizer.state.values()):  # to look for one makes an empty one
                self._nvme.expect(optimizer, pages, rooms)

    def stepped(self, optimizer: Optimizer) -> None:
        """It has made the step."""
        self._known[optimizer] = True
        self.over()

    @contextmanager
    def loading(self, optimizer: Optimizer, given: object) -> Iterator[ReplaceLoaded]:
        """An optimizer loads its state in this scope, which yields what replaces a loaded value; `given` is all of it.

        See `optimizer_loads.Loading`.
        """
        pages, loaded = self._pages(), partial(self._nvme.put_loaded, optimizer)
        if pages is None:
            yield loaded
            return
        self._placed.pop(optimizer, None)
        is_within = self._thread.makes_state  # a step, or another's load
        rooms = rooms_before_training(optimizer, pages, copies_in(given, optimizer))
        self._begin(pages, rooms)
        self._nvme.expect(optimizer, pages, rooms)
        try:
            yield loaded
        finally:
            if not is_within:
                self.over()

    def _begin(self, pages: PageAllocator, rooms: Mapping[int, StateRoom]) -> None:
        self._thread.makes_state = True
        pages.state(True, rooms)

    def over(self) -> None:
        """What this thread allocates from now on is no state, also where a step or a load has raised."""
        if self._thread.makes_state and (pages := self._pages()) is not None:
            self._thread.makes_state = False
            pages.state(False)

    def make_room_before_training(self) -> None:
        """At a model's first forward, before an optimizer has stepped: move master weights that HBM will lack room for.

        Else all activations and gradients of the first iteration would lie in DRAM.
        """
        pages, parameters = self._pages(), list(self._parameters())
        of_models = ModelWeights.among(parameters)
        if pages is None or not of_models.halves:
            return
        for optimizer in optimizers.all_alive():
            masters = master_weights(optimizer, of_models)
            self._move_out(pages, shortages_before_training(optimizer, masters, parameters, pages), masters)

    def demotable_bytes(self, device: torch.device) -> int:
        """Bytes of state in a GPU's memory that may be demoted; 0 if a step is not made in parts, or none may move.

        Of a step with a closure, which updates state in DRAM, that is not known here.
        """
        pages = self._pages()
        residence = None if pages is None or device.type != "cuda" else pages.residence(device)
        if residence is None or device in self._to_demote or self._steps_in_backward:
            return 0
        with self._moving() as may:  # while other threads train it would wait for ever
            return residence.demotable() if may and all(map(may_be_split, tuple(self._known))) else 0

    def demote(self, device: torch.device, nbytes: int) -> int:
        """Have up to so much state demoted when the next forward begins; return how many bytes will be."""
        if there := min(nbytes, self.demotable_bytes(device)):
            self._to_demote[device] = there
        return there

    def forward_begins(self) -> None:
        """An outermost module's forward begins: allocations are no state, and state that is to be demoted is."""
        self.over()
        pages = self._pages() if self._to_demote else None
        if pages is None:
            return
        with self._moving() as may:
            for device in tuple(self._to_demote) if may else ():
                residence, nbytes = pages.residence(device), self._to_demote.pop(device)
                if residence is not None and residence.make_room(nbytes):
                    _say_it_stays()

    def masters(self, optimizer: Optimizer) -> frozenset[int]:
        """The identities of those of an optimizer's parameters that are master weights, as far as that is known."""
        found: frozenset[int] = self._masters.get(optimizer, frozenset())
        return found

    def _make_room(self, pages: PageAllocator, optimizer: Optimizer, steps: int) -> bool:
        """Move state to DRAM, as far as HBM lacked room in the last forward and backward; whether it might move.

        Master weights count as state: they are read as rarely.
        """
        if self._steps != steps:
            self._model_weights, self._steps = ModelWeights.among(self._parameters()), steps
        masters = master_weights(optimizer, self._model_weights)
        self._masters[optimizer] = frozenset(map(id, masters))
        if not (optimizer.state or masters):
            return True
        kept = [*weights.plain_tensors(weights.tensors_in(optimizer.state)), *masters]
        return self._move_out(pages, shortages(optimizer, self._savers.thread.saver), kept)

    def _move_out(self, pages: PageAllocator, shortage: Mapping[torch.device, int], kept: Sequence[Tensor]) -> bool:
        """Move state to DRAM, so many bytes by device, and of what is `kept` where that is not enough.

        Returns
        -------
        bool
            Whether it might move.
        """
        with self._moving() as may:
            for device, nbytes in shortage.items() if may else ():
                residence = pages.residence(device)
                if residence is not None and (lacking := residence.make_room(nbytes)):
                    self._take_in(pages, [each for each in kept if each.device == device], device, residence, lacking)
        return may

    def _take_in(
        self,
        pages: PageAllocator,
        tensors: Sequence[Tensor],
        device: torch.device,
        residence: Residence,
        nbytes: int,
    ) -> None:
        """Have so many bytes lie in DRAM, and be known as state, that the allocator has as any other memory.

        That is state which a checkpoint brought to the GPU, and master weights.
        """
        known = residence.state_blocks()
        unknown = [each for each in tensors if each.data_ptr() not in known and has_own_storage(each)]
        self._begin(pages, {device.index: StateRoom(0, nbytes)})
        try:
            for tensor in sorted(unknown, key=lambda each: each.nbytes, reverse=True):
                if nbytes <= 0:
                    break
                if not _is_alone_on_its_memory(tensor):
                    continue
                if tensor.is_cuda:  # whose memory may be of another stream, which is to wait for the copy
                    tensor.record_stream(torch.cuda.current_stream(device))
                with torch.inference_mode(False):
                    tensor.data = tensor.detach().clone()  # the same object, for whoever has it
                nbytes -= tensor.nbytes
        except torch.OutOfMemoryError:
            _say_it_stays()
        finally:
            self.over()
        residence.count_state()


def _say_it_stays() -> None:
    log.warning("optimizer state stays in hbm, as dram has no room for it: raise TIERS_DRAM")


def _is_alone_on_its_memory(tensor: Tensor) -> bool:
    """Whether no other tensor, of the program's or of a graph, has its storage: it would keep the old memory."""
    return _uses(tensor) <= _uses(torch.empty(1))  # whatever this release of PyTorch counts


def _uses(tensor: Tensor) -> int:
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))
