"""Cuts a parameter, with its gradient and its state, into chunks, for optimizers that update each number by itself.

So state of any size comes through a buffer of a few slices, and its first chunk leaves while its last one comes.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from torch_tiers.migrator.program.subclasses import is_dtensor, own_memory
from torch_tiers.migrator.state.nvme_tensor import NvmeTensor
from torch_tiers.migrator.state.parameter_state import PARAMETER, ParameterState

ALIGNED = 1 << 14  # numbers: where a kernel takes several at once, a chunk begins where it would begin in the whole


def chunks(of: ParameterState, most: int) -> list[ParameterState]:
    """Return chunks with at most so many bytes to copy, in order; `[of]` if it is small enough, or cannot be cut.

    A chunk's tensors are flat views of the whole's. Each chunk but the last gets a copy of tensors without dimensions,
    such as a number of steps, so that the whole counts once.

    An optimizer cannot update plain tensors together with DTensors. So a DTensor is replaced by plain chunks, even if
    one is enough; the list is empty if it cannot be cut.
    """
    distributed = is_dtensor(of.parameter)
    if not may_be_cut(of):
        return [] if distributed else [of]
    if of.nbytes <= most and not distributed:
        return [of]
    return cut_at(of, max(ALIGNED, most * of.parameter.numel() // max(1, of.nbytes) // ALIGNED * ALIGNED))


def cut_at(of: ParameterState, length: int) -> list[ParameterState]:
    """Return chunks of so many numbers each, of what `may_be_cut`."""
    parameter, gradient = own_memory(of.parameter), own_memory(of.parameter.grad)
    assert parameter is not None and gradient is not None
    count = parameter.numel()
    flat, flat_gradient = parameter.detach().view(-1), gradient.detach().view(-1)
    found = []
    for first in range(0, count, length):
        numbers = slice(first, min(count, first + length))
        chunk = flat[numbers]
        chunk.grad = flat_gradient[numbers]
        state = {name: _part(value, numbers, is_last=numbers.stop == count) for name, value in of.state.items()}
        parts = {**state, PARAMETER: chunk}
        found.append(ParameterState(of.group, chunk, state, {name: parts[name] for name in of.tensors}))
    return found


def may_be_cut(of: ParameterState) -> bool:
    """Whether all tensors with dimensions have the parameter's shape, and their numbers one after the other.

    The gradient must have the parameter's type, too: PyTorch refuses another one for a chunk.
    """
    parameter, gradient = own_memory(of.parameter), own_memory(of.parameter.grad)
    if parameter is None or gradient is None or gradient.dtype != parameter.dtype:
        return False
    plain = (value for value in of.state.values() if isinstance(value, Tensor) and not isinstance(value, NvmeTensor))
    return all(
        each is not None and (each.ndim == 0 or (each.size() == parameter.size() and each.is_contiguous()))
        for each in (parameter, gradient, *map(own_memory, plain))
    )


def _part(value: Any, numbers: slice, *, is_last: bool) -> Any:
    if isinstance(value, NvmeTensor):
        return value.contents.part_at(numbers.start)
    memory = own_memory(value)
    if memory is None:
        return value
    if memory.ndim:
        return memory.detach().view(-1)[numbers]
    return value if is_last else value.clone()
