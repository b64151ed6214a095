"""What lives as long as the program: parameters, buffers, gradients, optimizer state; counted by storage."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

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


class Gathered:
    """In which storages FSDP gathers parameters for a module's forward, and for its backward; root by root."""

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[nn.Module, set[int] | None] = weakref.WeakKeyDictionary()

    def of(self, root: nn.Module, *, afresh: bool = False) -> set[int] | None:
        """The storages, by identity; none where nothing is sharded.

        None where they are not known: before the first forward, and under FSDP's older form. What was found before is
        good unless it is to be looked up `afresh`: to visit all modules takes milliseconds, in which the device has
        nothing to do.
        """
        if afresh or root not in self._known:
            self._known[root] = _gathered_within(root)
        return self._known[root]


def _gathered_within(root: nn.Module) -> set[int] | None:
    found: list[torch.Tensor] = []
    for module in root.modules():
        names = {base.__name__ for base in type(module).__mro__}  # to import those classes takes a second
        if "FullyShardedDataParallel" in names:
            return None
        if "FSDPModule" not in names:
            continue
        state: Any = module._get_fsdp_state()  # type: ignore[operator]  # PyTorch has no other way to ask
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        for each in (each for group in groups if group is not None for each in group.fsdp_params):
            if not hasattr(each, "_unsharded_param"):
                return None
            found.append(each._unsharded_param)  # `fully_shard` fills, empties and fills it again
    return storages(plain_tensors(found))
