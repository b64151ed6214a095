"""Has optimizer state lie where there is room for it: as it is made or loaded, and once an iteration was recorded."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary

from torch_tiers.allocator.layout.residence import Residence
from torch_tiers.allocator.pages import PageAllocator, StateRoom
from torch_tiers.migrator.program import weights
from torch_tiers.migrator.program.master_weights import MasterWeights
from torch_tiers.migrator.runtime.savers import Savers
from torch_tiers.migrator.runtime.state_room import rooms_before_training, shortages, state_rooms
from torch_tiers.migrator.state.parameter_state import has_own_storage

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
    of_models : callable
        Returns the parameters of all models that have run.
    """

    def __init__(
        self,
        pages: Callable[[], PageAllocator | None],
        savers: Savers,
        moving: Callable[[], AbstractContextManager[bool]],
        of_models: Callable[[], Iterable[Tensor]],
    ) -> None:
        self._pages = pages
        self._savers = savers
        self._moving = moving
        self._known = WeakIdKeyDictionary()  # optimizers that have stepped, which may compare as they like
        self._placed = WeakIdKeyDictionary()  # those that have done so while an iteration was recorded
        self._masters = MasterWeights(of_models)
        self._read_once = WeakTensorKeyDictionary()  # in a step, what the allocator does not know as state
        self.backward_over = self._masters.backward_over
        self._thread = _Thread()

    def stepping(self, optimizer: Optimizer, steps: int) -> None:
        """An optimizer begins a step, after so many of the program: it may make its state."""
        pages = self._pages()
        if pages is None:
            return
        if self._masters.stepping(optimizer):
            self._placed.pop(optimizer, None)
        rooms = {} if optimizer in self._placed else state_rooms(optimizer, self._savers.thread.saver)
        # What was loaded, or made in a step before, makes room.
        if rooms and (not optimizer.state or self._make_room(pages, optimizer)):
            self._placed[optimizer] = True
        if optimizer not in self._known or steps < FIRST_STEPS:
            self._begin(pages, rooms)

    def stepped(self, optimizer: Optimizer) -> None:
        """It has made the step."""
        self._known[optimizer] = True
        self.over()

    @contextmanager
    def loading(self, optimizer: Optimizer) -> Iterator[None]:
        """An optimizer loads its state in this scope."""
        pages = self._pages()
        if pages is None:
            yield
            return
        self._placed.pop(optimizer, None)
        is_within = self._thread.makes_state  # a step, or another's load
        self._begin(pages, rooms_before_training(optimizer, pages))
        try:
            yield
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

    def _make_room(self, pages: PageAllocator, optimizer: Optimizer) -> bool:
        """Move state to DRAM, as far as HBM lacked room in the last forward and backward; whether it might move."""
        shortage = shortages(optimizer, self._savers.thread.saver)
        devices = {parameter.device for group in optimizer.param_groups for parameter in group["params"]}
        with self._moving() as may:
            for device in devices if may else ():
                if (residence := pages.residence(device)) is not None:
                    self._note_read_once(optimizer, device, residence)
                    if device in shortage:
                        residence.make_room(shortage[device])
        return may

    def _note_read_once(self, optimizer: Optimizer, device: torch.device, residence: Residence) -> None:
        """Say what is read once a step beside the state that the allocator knows.

        That is state which a checkpoint brought to the GPU as any other memory, and master weights.
        """
        known = residence.state_blocks()
        kept = weights.plain_tensors([*weights.tensors_in(optimizer.state), *self._masters.of(optimizer)])
        for tensor in kept:
            if tensor.device == device and tensor.data_ptr() not in known and has_own_storage(tensor):
                self._read_once[tensor] = True
        residence.set_read_once(partial(self._by_address, device))

    def _by_address(self, device: torch.device) -> dict[int, int]:
        found = (tensor for tensor in list(self._read_once) if tensor.device == device)
        return {tensor.data_ptr(): tensor.nbytes for tensor in found if has_own_storage(tensor)}
