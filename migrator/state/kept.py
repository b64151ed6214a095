"""What an optimizer keeps for one parameter, as far as it lies in DRAM."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_tiers.allocator.sizes import MiB, round_up
from torch_tiers.migrator.streams.pieces import SLOT

LEAST = 1 * MiB  # bytes: smaller tensors are read where they lie, as a copy of one takes no less time


@dataclass(frozen=True, slots=True)
class Kept:
    """The state of one parameter.

    Attributes
    ----------
    group : int
        The parameter's group in the optimizer.
    parameter : Tensor
        It has a gradient.
    state : dict
        The optimizer's, of the parameter.
    tensors : dict of str to Tensor
        What of it lies in DRAM, by name.
    """

    group: int
    parameter: Tensor
    state: dict[str, Any]
    tensors: dict[str, Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of a buffer that the tensors take."""
        return sum(round_up(tensor.untyped_storage().nbytes(), SLOT) for tensor in self.tensors.values())


def in_dram(optimizer: torch.optim.Optimizer, lies_in_dram: Callable[[Tensor], bool]) -> Iterator[Kept]:
    """Yield what of an optimizer's state lies in DRAM, of parameters that the next step updates."""
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            state = optimizer.state.get(parameter) if parameter.grad is not None else None
            if not isinstance(state, dict):
                continue
            tensors = {name: value for name, value in state.items() if _has_own_memory(value) and lies_in_dram(value)}
            if tensors:
                yield Kept(index, parameter, state, tensors)


def _has_own_memory(value: object) -> bool:
    """Whether it is a plain tensor, and its storage holds nothing else."""
    if type(value) is not Tensor or value.layout is not torch.strided:
        return False
    nbytes = value.untyped_storage().nbytes()
    return nbytes >= LEAST and nbytes == value.numel() * value.element_size() and value.storage_offset() == 0
