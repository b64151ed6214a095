"""What lives as long as the program: parameters, buffers, gradients, optimizer state; counted by storage."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from torch_tiers.migrator.program import modules
from torch_tiers.migrator.program.subclasses import PLAIN, parts_of


def plain_tensors(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Those that have memory of their own; what others consist of stands for them."""
    for tensor in tensors:
        if type(tensor) not in PLAIN:
            yield from plain_tensors(parts_of(tensor))
        # Within torch.func's transforms a module's parameters are wrappers that look plain and have no storage.
        elif tensor.layout is torch.strided and not torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            yield tensor


def of_module(module: nn.Module) -> Iterator[torch.Tensor]:
    """Parameters and buffers."""
    yield from plain_tensors(modules.tensors(module))


def parameters_of(module: nn.Module) -> Iterator[torch.Tensor]:
    """Parameters alone."""
    for _, each in modules.walk(module):
        yield from plain_tensors(tensor for tensor in each._parameters.values() if tensor is not None)


def of_optimizer(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Gradients and the optimizer's state."""
    for group in optimizer.param_groups:
        yield from plain_tensors(p.grad for p in group["params"] if p.grad is not None)
    yield from plain_tensors(tensors_in(optimizer.state))


def tensors_in(state: object) -> Iterator[torch.Tensor]:
    """Those in an optimizer's state: as a rule a dict for each parameter. Mappings, lists and tuples are searched."""
    left, seen = [state], set[int]()
    while left:
        value = left.pop()
        if isinstance(value, torch.Tensor):
            yield value
        elif id(value) in seen:  # it may contain itself
            continue
        elif isinstance(value, Mapping):
            seen.add(id(value))
            left += value.values()
        elif isinstance(value, (list, tuple)):
            seen.add(id(value))
            left += value


def storages(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Identities of the storages."""
    return {tensor.untyped_storage()._cdata for tensor in tensors}


def bytes_on(device: torch.device, tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages on `device`, each counted once."""
    found = [tensor.untyped_storage() for tensor in tensors if tensor.device == device]
    return sum({storage._cdata: storage.nbytes() for storage in found}.values())


class Gathering:
    """In which storages FSDP gathers parameters for a forward that begins now, and for its backward.

    FSDP2 has the same storage for a parameter every time, and empties it in between.

    Attributes
    ----------
    storages : set of int
        By identity.
    """

    def __init__(self, storages: set[int], shards: Sequence[torch.Tensor]) -> None:
        self.storages = storages
        self._shards = shards
        self._versions = [shard._version for shard in shards]
        self._asked = (-1, False)  # in which backward, and the answer

    def changed(self) -> bool:
        """Whether a parameter was changed since: backward gathers other bytes than forward did. Once a backward."""
        backward = torch._C._current_graph_task_id()
        if backward == -1 or self._asked[0] != backward:
            now = [shard._version for shard in self._shards]
            self._asked = backward, now != self._versions
        return self._asked[1]


class Gathered:
    """What FSDP gathers, root by root."""

    def __init__(self) -> None:
        self._known = WeakIdKeyDictionary()  # of roots, which may compare as they like

    def of(self, root: nn.Module, *, afresh: bool = False) -> Gathering | None:
        """What is gathered for a forward of a root, as far as it is known; None under FSDP's older form.

        What was found before is good unless it is to be looked up `afresh`: to visit all modules takes milliseconds, in
        which the device has nothing to do.
        """
        sharded = self._sharded(root, afresh=afresh)
        if sharded.is_older:
            return None
        return Gathering(storages(plain_tensors(sharded.whole)), sharded.shards)

    def is_known(self, root: nn.Module) -> bool:
        """Whether no parameter of a root comes to lie anywhere else: some are gathered for the first time later."""
        sharded = self._sharded(root)
        return sharded.is_complete and not sharded.is_older

    def _sharded(self, root: nn.Module, *, afresh: bool = False) -> _Sharded:
        if afresh or root not in self._known:
            self._known[root] = _Sharded.within(root)
        known: _Sharded = self._known[root]
        return known


@dataclass(slots=True)
class _Sharded:
    """The FSDP2 parameters within a root: unsharded tensors, and this rank's shards.

    The unsharded ones are held so that no other tensor gets the address of their storage. They are not complete before
    each was gathered once. FSDP's older form does not show its own.
    """

    whole: list[torch.Tensor] = field(default_factory=list)
    shards: list[torch.Tensor] = field(default_factory=list)
    is_complete: bool = True
    is_older: bool = False

    @classmethod
    def within(cls, root: nn.Module) -> _Sharded:
        found = cls()
        for _, module in modules.walk(root):
            names = {base.__name__ for base in type(module).__mro__}  # to import those classes takes a second
            found.is_older |= "FullyShardedDataParallel" in names
            if "FSDPModule" not in names:
                continue
            state: Any = module._get_fsdp_state()  # type: ignore[operator]  # PyTorch has no other way to ask
            groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
            for each in (each for group in groups if group is not None for each in group.fsdp_params):
                # A DTensor's version tells of an optimizer, its local tensor's of who changes that.
                found.shards += [each.sharded_param, *plain_tensors([each.sharded_param])]
                if hasattr(each, "_unsharded_param"):
                    found.whole.append(each._unsharded_param)
                else:
                    found.is_complete = False
        return found
