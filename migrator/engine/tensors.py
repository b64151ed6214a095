"""What the hooks do with every tensor that is saved, and with what is packed in its place.

All that happens once a tensor, in `moved.py` and `storages.py`, apart from what happens once a group, so that it can be
done twice: in Python, and again in C++ (`native/`) at a fraction of the host's time, where that can be built. `Tensors`
is what the two have in common; the tests hold both to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeAlias

import torch
from torch import Tensor

from torch_tiers.migrator.engine.moved import Moved, Saved, arrange, let_go, nothing, spans
from torch_tiers.migrator.engine.storages import Storages, memory_of
from torch_tiers.migrator.timing import HookTime

if TYPE_CHECKING:
    from torch_tiers.migrator.engine.group import Claim, Group
    from torch_tiers.migrator.engine.mover import Mover
    from torch_tiers.migrator.hooks.actions import Action, Go
    from torch_tiers.migrator.hooks.saver import Saver
    from torch_tiers.migrator.hooks.sites import Place
    from torch_tiers.migrator.hooks.stack import Hooks
    from torch_tiers.migrator.recording.recorder import Record

__all__ = [
    "Moved",
    "Saved",
    "Storages",
    "Tensors",
    "arrange",
    "charge",
    "counter",
    "hooks",
    "let_go",
    "memory_of",
    "spans",
    "spent",
]


def hooks(saver: Saver, place: Place[Action], least: int) -> Hooks:
    """What PyTorch is to call for `saver`: its own methods. The twin's go before them.

    Those have to know where the thread is, and that storages of fewer than `least` bytes stay.
    """
    return saver.pack, saver.unpack


def counter(tensor: Tensor) -> Tensor:
    """Shares the version counter of a tensor, and has no memory."""
    alias = tensor.detach()
    alias.data = nothing(tensor.dtype, tensor.device)
    return alias


def spent() -> HookTime | None:
    """What hooks have taken so far in this process; None where nobody counts that."""
    return None


def charge(kind: int) -> int:
    """What a thread does from now on within a hook is of another field of `HookTime`; the one that it was of."""
    return kind


_SavedType: TypeAlias = Saved
_MovedType: TypeAlias = Moved
_StoragesType: TypeAlias = Storages


class Tensors(Protocol):
    """This module, or its native twin: each name means what it means here."""

    def Saved(self, group: Group, tensor: Tensor, low: int, nbytes: int) -> _SavedType:  # noqa: D102
        ...

    def Moved(  # noqa: D102
        self, tensor: Tensor, mover: Mover, saved: _SavedType, claim: Claim, go: Go | None, record: Record | None
    ) -> _MovedType: ...

    def Storages(self) -> _StoragesType:  # noqa: D102
        ...

    def memory_of(self, tensor: Tensor, least: int) -> int:  # noqa: D102
        ...

    def arrange(self, members: list[_SavedType]) -> int:  # noqa: D102
        ...

    def spans(self, members: list[_SavedType], address: int) -> bytes:  # noqa: D102
        ...

    def let_go(self, members: list[_SavedType], empty: Callable[[torch.dtype], Tensor]) -> None:  # noqa: D102
        ...

    def hooks(self, saver: Saver, place: Place[Action], least: int) -> Hooks:  # noqa: D102
        ...

    def counter(self, tensor: Tensor) -> Tensor:  # noqa: D102
        ...

    def spent(self) -> HookTime | None:  # noqa: D102
        ...

    def charge(self, kind: int) -> int:  # noqa: D102
        ...
