"""What an optimizer has for each parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from torch_tiers.allocator.sizes import MiB, round_up
from torch_tiers.migrator.program.subclasses import own_memory
from torch_tiers.migrator.streams.pieces import SLOT

PARAMETER = ""  # the name of the parameter itself among the tensors that come to HBM: no state has it
LEAST = 1 * MiB  # bytes: smaller tensors are read where they lie, as a copy of one takes no less time


@dataclass(frozen=True, slots=True)
class ParameterState:
    """The state of one parameter, or of a chunk of one.

    Attributes
    ----------
    group : int
        The number of the parameter's group in the optimizer.
    parameter : Tensor
        The parameter, or the chunk. It has a gradient.
    state : dict
        The optimizer's state of the parameter; empty before the first step.
    tensors : dict of str to Tensor or NvmePart
        The tensors that may come to HBM, by name: of the state, and the parameter as `PARAMETER`. Of a DTensor what
        this rank has.
    """

    group: int
    parameter: Tensor
    state: dict[str, Any]
    tensors: dict[str, Any]

    @property
    def nbytes(self) -> int:
        """Bytes of a buffer that the tensors take."""
        return sum(round_up(tensor.nbytes, SLOT) for tensor in self.tensors.values())


def those_in_dram(states: Iterable[ParameterState], lies_in_dram: Callable[[Tensor], bool]) -> Iterator[ParameterState]:
    """Yield those of which tensors lie in DRAM, each with these tensors alone."""
    for each in states:
        if tensors := {name: tensor for name, tensor in each.tensors.items() if lies_in_dram(tensor)}:
            yield replace(each, tensors=tensors)


def all_but(states: Iterable[ParameterState], updated: Iterable[ParameterState]) -> Iterator[ParameterState]:
    """Yield those of other parameters than the updated ones."""
    known = {id(each.parameter) for each in updated}
    return (each for each in states if id(each.parameter) not in known)


def by_group(states: Iterable[ParameterState]) -> dict[int, list[Tensor]]:
    """The parameters, by the number of their group."""
    found: dict[int, list[Tensor]] = {}
    for each in states:
        found.setdefault(each.group, []).append(each.parameter)
    return found


def all_states(optimizer: Optimizer, masters: frozenset[int] = frozenset()) -> Iterator[ParameterState]:
    """Yield the state of each parameter that the next step updates, also where it has none yet.

    Of master weights, by their identities, the parameter itself may come to HBM, too.
    """
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            state = optimizer.state.get(parameter, {})
            memory = {name: own_memory(value) for name, value in state.items()}
            if id(parameter) in masters and _may_have(parameter, parameter.grad):
                memory[PARAMETER] = own_memory(parameter)
            tensors = {
                name: tensor for name, tensor in memory.items() if tensor is not None and has_own_storage(tensor)
            }
            yield ParameterState(index, parameter, state, tensors)


def _may_have(parameter: Tensor, gradient: Tensor) -> bool:
    """Whether PyTorch lets a copy of a parameter have its gradient."""
    return gradient.dtype == parameter.dtype and gradient.size() == parameter.size()


def version_of(tensor: Tensor) -> int:
    """How often operators have written a tensor, as it counts that; 0 for one that does not, of inference mode."""
    return 0 if tensor.is_inference() else tensor._version


def has_own_storage(tensor: Tensor) -> bool:
    """Whether its storage holds nothing else, and is not small."""
    if tensor.is_conj() or tensor.is_neg():  # whose bytes are not its numbers
        return False
    nbytes = tensor.untyped_storage().nbytes()
    return nbytes >= LEAST and nbytes == tensor.numel() * tensor.element_size() and tensor.storage_offset() == 0
