"""The interface of the C++ part of the hooks (`native/`), which handles each saved tensor and the object packed for it.

Types only. Functions that handle whole groups are elsewhere. Whoever needs the module receives it as `HookTensors`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

from torch import Tensor, nn

from torch_tiers.migrator.model.timing import HookTime
from torch_tiers.migrator.offload.group import Claim, Saved
from torch_tiers.migrator.offload.tensors import Tensors
from torch_tiers.migrator.program.optimizers import Optimizers
from torch_tiers.migrator.program.sites import Modules, Place
from torch_tiers.migrator.recording.record import Record
from torch_tiers.migrator.recording.storages import Storages
from torch_tiers.migrator.saved.actions import Action, Go, Moved, Owner
from torch_tiers.migrator.saved.stack import Hooks, OnStack

_Moved: TypeAlias = Moved  # within `HookTensors` these names are those of its functions
_Storages: TypeAlias = Storages


class Calls(Protocol):
    """What the program's calls of modules pass through."""

    def enter(self, module: nn.Module, /) -> bool:
        """A module is called; whether `leave` is to be called after that."""

    def leave(self) -> None:
        """It returns, or raises."""

    def arm(self, saver: OnStack, modules: Modules[Action], optimizers: Optimizers, /) -> None:
        """Take the shortcut in this thread, in which the hooks of `saver` are; that is not kept alive.

        `modules` are the saver's. While hooks rest, only the first module after a step of `optimizers` is told of.
        """


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

    def calls(self, enter: Callable[[nn.Module], object], leave: Callable[[], None]) -> Calls:
        """What is to be called around calls of modules: a shortcut in front of `enter` and `leave`."""

    def spent(self) -> HookTime:
        """What hooks have taken so far in this process."""
