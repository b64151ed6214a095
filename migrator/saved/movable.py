"""Which saved tensors may move: those with memory of their own, that belongs to no parameter or buffer."""

from __future__ import annotations

import weakref

from torch import Tensor, nn

from torch_tiers.migrator.program import weights
from torch_tiers.migrator.saved.tensors import HookTensors

MIN_BYTES = 4096
"""Smaller storages stay in HBM: handling one costs more than its memory is worth."""


class Movable:
    """Tells which tensors may move, of those that one thread saves."""

    def __init__(self, tensors: HookTensors) -> None:
        self.gathered = weights.Gathered()  # the storages that are filled with parameters for a while
        self._tensors = tensors
        self._root: weakref.ref[nn.Module] | None = None  # whose forward is the outermost
        self._weights: set[int] | None = set()  # storages of its parameters and buffers, once somebody has asked
        self._changing = False  # whether it is not known which are gathered

    def forward_begins(self, root: nn.Module) -> None:
        """Take note that the forward of an outermost module begins."""
        # Afresh for every outermost forward: `.data` swaps and sharding replace storages. But not before somebody
        # asks: to visit hundreds of parameters takes milliseconds, in which the device has nothing to do.
        self._root, self._weights = weakref.ref(root), None

    def may_move(self, tensor: Tensor, *, planned: bool = False) -> bool:
        """Return whether a tensor may move; of what is `planned` to, less is checked: it was recorded."""
        storage = self._tensors.memory_of(tensor, MIN_BYTES)
        return storage != 0 and (planned or not self.is_weight(storage))

    def is_weight(self, storage: int) -> bool:
        """Return whether a storage is of a parameter or buffer of the outermost module that runs."""
        if self._weights is None or self._changing:  # FSDP gathers a layer's parameters right before its forward
            root = self._root() if self._root is not None else None
            self._weights = set()
            if root is not None:
                gathering = self.gathered.of(root)
                self._changing = not self.gathered.is_known(root)
                self._weights.update(weights.storages(weights.of_module(root)), gathering.storages if gathering else ())
        return storage in self._weights
