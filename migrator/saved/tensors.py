"""The interface of the C++ part of the hooks (`native/`), which handles each saved tensor and the object packed for it.

Types only. Functions that handle whole groups are elsewhere. Whoever needs the module receives it as `HookTensors`.
"""

from __future__ import annotations

from typing import Protocol, TypeAlias

from torch import Tensor

from torch_tiers.migrator.model.timing import HookTime
from torch_tiers.migrator.offload.group import Claim, Saved
from torch_tiers.migrator.offload.tensors import Tensors
from torch_tiers.migrator.program.sites import Place
from torch_tiers.migrator.recording.record import Record
from torch_tiers.migrator.recording.storages import Storages
from torch_tiers.migrator.saved.actions import Action, Go, Moved, Owner
from torch_tiers.migrator.saved.stack import Hooks, OnStack

_Moved: TypeAlias = Moved  # within `HookTensors` these names are those of its functions
_Storages: TypeAlias = Storages


class HookTensors(Tensors, Protocol):
    """The module."""

    def Moved(
        self, tensor: Tensor, mover: Owner, saved: Saved, claim: Claim, go: Go | None, record: Record | None
    ) -> _Moved:
        """Stand in for a tensor; `claim` keeps the group from being forgotten, and is never looked at."""

    def Storages(self) -> _Storages:
        """Know of no storage yet."""

    def memory_of(self, tensor: Tensor, least: int) -> int:
        """The identity of the storage of a tensor that may move: one of at least so many bytes. 0 if it may not.

        It must be nothing but strided memory, and no view of a parameter.
        """

    def hooks(self, saver: OnStack, place: Place[Action], least: int) -> Hooks:
        """What PyTorch is to call for `saver`: a shortcut in front of its own methods.

        That goes by where the thread is, and by that storages of fewer than `least` bytes stay.
        """

    def spent(self) -> HookTime:
        """What hooks have taken so far in this process."""
