"""What lives as long as the program: parameters, buffers, gradients, optimizer state; counted by storage."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn


def plain_tensors(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Those that have memory of their own; a DTensor's local shard stands for it."""
    for tensor in tensors:
        local = getattr(tensor, "_local_tensor", tensor)
        plain = type(local) in (torch.Tensor, nn.Parameter, nn.Buffer) and local.layout is torch.strided
        # Within torch.func's transforms a module's parameters are wrappers that look plain and have no storage.
        if plain and not torch._C._functorch.is_functorch_wrapped_tensor(local):
            yield local


def of_module(module: nn.Module) -> Iterator[torch.Tensor]:
    """Parameters and buffers."""
    yield from plain_tensors(module.parameters())
    yield from plain_tensors(module.buffers())


def of_optimizer(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Gradients and the optimizer's state."""
    for group in optimizer.param_groups:
        yield from plain_tensors(p.grad for p in group["params"] if p.grad is not None)
    for state in optimizer.state.values():
        yield from plain_tensors(value for value in state.values() if isinstance(value, torch.Tensor))


def storages(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Identities of the storages."""
    return {tensor.untyped_storage()._cdata for tensor in tensors}


def bytes_on(device: torch.device, tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages on `device`, each counted once."""
    found = [tensor.untyped_storage() for tensor in tensors if tensor.device == device]
    return sum({storage._cdata: storage.nbytes() for storage in found}.values())


def is_sharded(module: nn.Module) -> bool:
    """Whether FSDP gathers and frees the parameters of some module within."""
    kinds = {type(child) for child in module.modules()}
    return any(base.__name__ in ("FSDPModule", "FullyShardedDataParallel") for kind in kinds for base in kind.__mro__)
