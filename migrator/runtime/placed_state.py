"""Has optimizer state lie where there is room for it: as it is made or loaded, and once an iteration was recorded."""

from __future__ import annotations

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
from torch_tiers.migrator.program import weights
from torch_tiers.migrator.program.master_weights import OfModels, master_weights
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
        self._parameters = of_models
        # As they were after so many steps: there may be an optimizer for each of them.
        self._of_models, self._at = OfModels.among(()), -1
        # Of optimizers, the identities of what the allocator does not know as state. No weak references: PyTorch does
        # not swap tensors that have any.
        self._read_once = WeakIdKeyDictionary()
        self._residences: dict[torch.device, Residence] = {}  # that were told of it
        self._thread = _Thread()

    def stepping(self, optimizer: Optimizer, steps: int) -> None:
        """An optimizer begins a step, after so many of the program: it may make its state."""
        pages = self._pages()
        if pages is None:
            return
        rooms = {} if optimizer in self._placed else state_rooms(optimizer, self._savers.thread.saver)
        # What was loaded, or made before, makes room.
        if rooms and self._make_room(pages, optimizer, steps):
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

    def close(self) -> None:
        """What is allocated from now on is no state, and the allocator, which goes on, asks here no more."""
        self.over()
        for residence in self._residences.values():
            residence.set_read_once(dict)

    def _make_room(self, pages: PageAllocator, optimizer: Optimizer, steps: int) -> bool:
        """Move state to DRAM, as far as HBM lacked room in the last forward and backward; whether it might move."""
        if self._at != steps:
            self._of_models, self._at = OfModels.among(self._parameters()), steps
        masters = master_weights(optimizer, self._of_models)
        if not (optimizer.state or masters):
            return True
        shortage = shortages(optimizer, self._savers.thread.saver)
        with self._moving() as may:
            for device in self._note_read_once(pages, optimizer, masters) if may else ():
                residence = pages.residence(device)
                if residence is not None and device in shortage:
                    residence.make_room(shortage[device])
        return may

    def _note_read_once(
        self, pages: PageAllocator, optimizer: Optimizer, masters: Sequence[Tensor]
    ) -> set[torch.device]:
        """Say what of an optimizer is read once a step beside the state that the allocator knows; return its devices.

        That is state which a checkpoint brought to the GPU as any other memory, and master weights.
        """
        tensors = [*weights.plain_tensors(weights.tensors_in(optimizer.state)), *masters]
        devices = {tensor.device for tensor in tensors}
        self._read_once[optimizer] = {id(master) for master in masters}
        for device in devices:
            if (residence := pages.residence(device)) is not None:
                self._residences[device] = residence
                residence.set_read_once(partial(self._by_address, device))
        return devices

    def _by_address(self, device: torch.device) -> dict[int, int]:
        """What is read once a step and has a block of its own: bytes by address."""
        found: dict[int, int] = {}
        for optimizer, masters in self._read_once.items():
            updated = (parameter for group in optimizer.param_groups for parameter in group["params"])
            kept = weights.plain_tensors(weights.tensors_in(optimizer.state))
            for tensor in (*kept, *(each for each in updated if id(each) in masters)):
                if tensor.device == device and has_own_storage(tensor):
                    found[tensor.data_ptr()] = tensor.nbytes
        return found
