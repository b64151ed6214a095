"""What lives as long as the program: parameters, buffers, gradients, optimizer state; counted by storage."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn


def plain_tensors(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Those that have memory of their own; a DTensor's local shard stands for it."""
    for tensor in tensors:
        local = getattr(tensor, "_local_tensor", tensor)
        if type(local) in (torch.Tensor, nn.Parameter, nn.Buffer) and local.layout is torch.strided:
            yield local


def of_module(module: nn.Module) -> Iterator[torch.Tensor]:
    """Parameters and buffers."""
    yield from plain_tensors(module.parameters())
    yield from plain_tensors(module.buffers())


def of_optimizer(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Parameters, their gradients, and the optimizer's state."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield from plain_tensors([parameter] if parameter.grad is None else [parameter, parameter.grad])
    for state in optimizer.state.values():
        yield from plain_tensors(value for value in state.values() if isinstance(value, torch.Tensor))


def storages(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Identities of the storages."""
    return {tensor.untyped_storage()._cdata for tensor in tensors}

