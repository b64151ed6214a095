"""Has optimizer state lie where there is room for it: as it is made or loaded, and once an iteration was recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from torch_tiers.allocator.pages import PageAllocator
from torch_tiers.migrator.runtime.savers import Savers
from torch_tiers.migrator.runtime.state_room import rooms_before_training, shortages, state_rooms

FIRST_STEPS = 3  # steps after which an optimizer has made its state


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
    """

    def __init__(
        self,
        pages: Callable[[], PageAllocator | None],
        savers: Savers,
        moving: Callable[[], AbstractContextManager[bool]],
    ) -> None:
        self._pages = pages
        self._savers = savers
        self._moving = moving
        self._known = WeakIdKeyDictionary()  # optimizers that have stepped, which may compare as they like
        self._placed = WeakIdKeyDictionary()  # those that have done so while an iteration was recorded

    def stepping(self, optimizer: Optimizer, steps: int) -> None:
        """An optimizer begins a step, after so many of the program: it may make its state."""
        pages = self._pages()
        if pages is None:
            return
        rooms = {} if optimizer in self._placed else state_rooms(optimizer, self._savers.thread.saver)
        if rooms:
            self._placed[optimizer] = True
            if optimizer.state:  # it was loaded, or made in a step before
                self._make_room(pages, optimizer)
        if optimizer not in self._known:
            pages.state(True, rooms or rooms_before_training(optimizer, pages))
        elif steps < FIRST_STEPS:
            pages.state(True, rooms)

    def stepped(self, optimizer: Optimizer) -> None:
        """It has made the step."""
        self._known[optimizer] = True
        if (pages := self._pages()) is not None:
            pages.state(False)

    @contextmanager
    def loading(self, optimizer: Optimizer) -> Iterator[None]:
        """An optimizer loads its state in this scope."""
        pages = self._pages()
        if pages is None:
            yield
            return
        pages.state(True, rooms_before_training(optimizer, pages))
        try:
            yield
        finally:
            pages.state(False)

    def _make_room(self, pages: PageAllocator, optimizer: Optimizer) -> None:
        lacking = shortages(optimizer, self._savers.thread.saver)
        with self._moving() as may:
            for index, nbytes in lacking.items() if may else ():
                residence = pages.residence(torch.device("cuda", index))
                if residence is not None:
                    residence.make_room(nbytes)
