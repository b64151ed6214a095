"""Cuts what an optimizer keeps for one parameter into chunks, for optimizers that update each number by itself.

So a parameter of any size comes through a buffer of three slices, and its first chunk leaves while its last one comes.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from torch_tiers.migrator.program.subclasses import own_memory
from torch_tiers.migrator.state.parameter_state import ParameterState

ALIGNED = 1 << 14  # numbers: where a kernel takes several at once, a chunk begins where it would begin in the whole


def chunks(of: ParameterState, most: int) -> list[ParameterState]:
    """Return chunks of at most so many bytes of its tensors; it alone if it is no larger, or cannot be cut.

    A chunk's parameter, gradient and state are flat views; what is written there counts in the versions of the whole.
    Of tensors of one number, such as a count of steps, all chunks but the last have copies: the whole counts once.
    """
    parameter, gradient = own_memory(of.parameter), _own(of.parameter.grad)
    if of.nbytes <= most or parameter is None or gradient is None or not _is_in_one_order(of, parameter, gradient):
        return [of]
    count = parameter.numel()
    length = max(ALIGNED, most * count // of.nbytes // ALIGNED * ALIGNED)
    flat, flat_gradient = parameter.detach().view(-1), gradient.detach().view(-1)
    found = []
    for first in range(0, count, length):
        numbers = slice(first, min(count, first + length))
        chunk = flat[numbers]
        chunk.grad = flat_gradient[numbers]
        state = {name: _part(value, numbers, is_last=numbers.stop == count) for name, value in of.state.items()}
        found.append(ParameterState(of.group, chunk, state, {name: state[name] for name in of.tensors}))
    return found


def _is_in_one_order(of: ParameterState, parameter: Tensor, gradient: Tensor) -> bool:
    """Whether parameter, gradient and all that is kept have their numbers in the same order, one after the other."""
    kept = [_own(value) for value in of.state.values() if isinstance(value, Tensor)]
    return all(
        each is not None and (each.ndim == 0 or (each.size() == parameter.size() and each.is_contiguous()))
        for each in (parameter, gradient, *kept)
    )


def _part(value: Any, numbers: slice, *, is_last: bool) -> Any:
    memory = _own(value)
    if memory is None:
        return value
    if memory.ndim:
        return memory.detach().view(-1)[numbers]
    return value if is_last else value.clone()


def _own(value: object) -> Tensor | None:
    return own_memory(value) if isinstance(value, Tensor) else None
