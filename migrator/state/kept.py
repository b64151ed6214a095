"""What an optimizer keeps for each parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

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
        What of it may come to HBM, by name.
    """

    group: int
    parameter: Tensor
    state: dict[str, Any]
    tensors: dict[str, Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of a buffer that the tensors take."""
        return sum(round_up(tensor.untyped_storage().nbytes(), SLOT) for tensor in self.tensors.values())


def in_dram(optimizer: Optimizer, lies_in_dram: Callable[[Tensor], bool]) -> Iterator[Kept]:
    """Yield what of an optimizer's state lies in DRAM, of parameters that the next step updates."""
    for kept in _all(optimizer):
        if tensors := {name: tensor for name, tensor in kept.tensors.items() if lies_in_dram(tensor)}:
            yield replace(kept, tensors=tensors)


def all_but(optimizer: Optimizer, updated: Iterable[Kept]) -> Iterator[Kept]:
    """Yield the state of all parameters but those of `updated`."""
    known = {id(kept.parameter) for kept in updated}
    return (kept for kept in _all(optimizer) if id(kept.parameter) not in known)


def by_group(all_kept: Iterable[Kept]) -> dict[int, list[Tensor]]:
    """The parameters, by the number of their group."""
    found: dict[int, list[Tensor]] = {}
    for kept in all_kept:
        found.setdefault(kept.group, []).append(kept.parameter)
    return found


def _all(optimizer: Optimizer) -> Iterator[Kept]:
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            if parameter.grad is not None and isinstance(state, dict):
                yield Kept(index, parameter, state, {n: value for n, value in state.items() if _has_own_memory(value)})


def _has_own_memory(value: object) -> bool:
    """Whether it is a plain tensor, not a small one, and its storage holds nothing else."""
    if type(value) is not Tensor or value.layout is not torch.strided:
        return False
    nbytes = value.untyped_storage().nbytes()
    return nbytes >= LEAST and nbytes == value.numel() * value.element_size() and value.storage_offset() == 0
