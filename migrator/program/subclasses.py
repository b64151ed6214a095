"""What a tensor of a class of its own consists of, as weights in 4 or 8 bits do: plain tensors, which have memory."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

PLAIN = torch.Tensor, nn.Parameter, nn.Buffer
"""The types of tensors that have memory of their own."""


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Plain tensors on its memory, or others that have parts in turn; none if it does not tell.

    Wrappers have no memory of their own, and tell what they wrap, as `torch.compile` asks of them: a DTensor its shard,
    those of torchao their integers and scales. What is a tensor itself and has only a class, as those of bitsandbytes,
    is seen without it: what the class would do when it is asked is the program's.
    """
    with torch._C.DisableTorchFunctionSubclass():
        if is_traceable_wrapper_subclass(tensor):
            told = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
            return [each for each in told if isinstance(each, torch.Tensor)]  # a DTensor tells its mesh, too
        # One that has operators of its own may do with its memory as it likes.
        has_own = torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.Python)
        if has_own or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return []
        plain = torch.Tensor._make_subclass(torch.Tensor, tensor, tensor.requires_grad)
    return [plain, *_scales_of(tensor)]


def _scales_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """What bitsandbytes keeps beside a weight in 4 bits: a scale for each block, and one for each block of scales."""
    state = vars(tensor).get("quant_state")
    while state is not None:
        if isinstance(scales := getattr(state, "absmax", None), torch.Tensor):
            yield scales
        state = getattr(state, "state2", None)


def is_dtensor(tensor: object) -> TypeGuard[DTensor]:
    """Return whether it is distributed over ranks, each of which has a plain tensor of its own: under FSDP2 a shard."""
    loaded = sys.modules.get("torch.distributed.tensor")  # importing it takes a second; until then there is no DTensor
    return type(tensor) is getattr(loaded, "DTensor", None)  # which it lacks while another thread imports it


def own_memory(value: object) -> torch.Tensor | None:
    """Return the plain tensor that has a tensor's memory: itself, or what this rank has of a DTensor; else None."""
    if is_dtensor(value):
        parts = parts_of(value)
        value = parts[0] if len(parts) == 1 else None
    if isinstance(value, torch.Tensor) and type(value) in PLAIN and value.layout is torch.strided:
        return value
    return None
