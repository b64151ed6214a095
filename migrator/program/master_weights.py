"""Finds master weights: what an optimizer updates in place of a model's own weights, which are of fewer bits.

No forward and no backward reads them, so they may lie in DRAM as the optimizer's state does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary


class MasterWeights:
    """The master weights of all optimizers.

    A tensor that an optimizer updates is one if no model has it, and it got its gradient after a backward: what a
    forward has read gets it from backward.

    Parameters
    ----------
    of_models : callable
        Returns the parameters of all models that have run.
    """

    def __init__(self, of_models: Callable[[], Iterable[Tensor]]) -> None:
        self._of_models = of_models
        self._seen = WeakIdKeyDictionary()  # optimizers whose parameters were looked at
        self._may_be = WeakTensorKeyDictionary()  # whether the last backward left it without a gradient
        self._found = WeakTensorKeyDictionary()

    def backward_over(self) -> None:
        """A backward has ended."""
        for tensor in list(self._may_be):
            self._may_be[tensor] = tensor.grad is None

    def stepping(self, optimizer: Optimizer) -> bool:
        """An optimizer begins a step; return whether master weights of it are found."""
        if optimizer not in self._seen:
            self._seen[optimizer] = True
            known = {id(parameter) for parameter in self._of_models()}
            self._may_be.update((tensor, False) for tensor in _updated(optimizer) if id(tensor) not in known)
            return False
        if not self._may_be:  # as in most programs
            return False
        decided = [each for each in _updated(optimizer) if each in self._may_be and each.grad is not None]
        found = [tensor for tensor in decided if self._may_be.pop(tensor)]
        self._found.update((tensor, True) for tensor in found)
        return bool(found)

    def of(self, optimizer: Optimizer) -> list[Tensor]:
        """Those of an optimizer that were found."""
        return [tensor for tensor in _updated(optimizer) if tensor in self._found] if self._found else []


def _updated(optimizer: Optimizer) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])
