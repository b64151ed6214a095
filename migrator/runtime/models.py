"""The models that train, and whether the budget holds their weights."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from torch_tiers.allocator.errors import TiersError
from torch_tiers.allocator.sizes import format_at_least, format_size
from torch_tiers.migrator.program import weights
from torch_tiers.migrator.runtime.devices import has_tiers


class BudgetTooSmall(TiersError):
    """The HBM budget does not even hold the model's weights."""


class Models:
    """The outermost modules of which a forward has begun. Thread-safe.

    Parameters
    ----------
    hbm : callable
        A device's budget, in bytes.

    Attributes
    ----------
    any_ran : bool
        Whether there ever was one, be it gone or not.
    """

    def __init__(self, hbm: Callable[[torch.device], int]) -> None:
        self._hbm = hbm
        self.any_ran = False
        self._known = WeakIdKeyDictionary()  # whether they train, by model, which may compare as it likes
        self._listing = threading.Lock()  # threads add while others go through them

    def add(self, model: nn.Module, *, trains: bool = True) -> bool:
        """Take note of a model; whether it is new, or trains for the first time."""
        known = self._known.get(model)
        if known or known is trains:
            return False
        with self._listing:
            self._known[model] = trains
        self.any_ran = True
        return True

    def __contains__(self, model: nn.Module) -> bool:
        return model in self._known

    def forget(self, model: nn.Module) -> None:
        """Take no note of a model after all, as what was to be done with it was not."""
        with self._listing:
            self._known.pop(model, None)

    def parameters(self) -> Iterator[torch.Tensor]:
        """Parameters of all of them."""
        for model, _ in self._listed():
            yield from weights.parameters_of(model)

    def trained(self) -> Iterator[torch.Tensor]:
        """Parameters that get gradients, of those that train."""
        for model, trains in self._listed():
            if trains:
                yield from (tensor for tensor in weights.parameters_of(model) if tensor.requires_grad)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Parameters and buffers of all of them."""
        for model, _ in self._listed():
            yield from weights.of_module(model)

    def _listed(self) -> list[tuple[nn.Module, bool]]:
        with self._listing:
            return list(self._known.items())

    def check(self, streamed: Callable[[torch.device], int]) -> None:
        """See whether the budget holds their weights, without those that are `streamed`, in bytes.

        Raises
        ------
        BudgetTooSmall
            If it does not, on some device.
        """
        tensors = list(self.tensors())
        for device in {tensor.device for tensor in tensors if has_tiers(tensor.device)}:
            needed, budget = weights.bytes_on(device, tensors) - streamed(device), self._hbm(device)
            if needed > budget:
                raise BudgetTooSmall(
                    f"hbm is {format_size(budget)}, and the model's weights alone need {format_at_least(needed)} on "
                    f"{device}: raise TIERS_HBM above that, with room for gradients, optimizer state and the work "
                    "of a layer"
                )
