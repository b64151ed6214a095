"""What the C++ part of the hooks (`native/`) does with each tensor that is saved, and with what is packed in its place.

All that happens once a tensor is there, apart from what happens once a group. Types only: who needs the module is given
it, as `Tensors`.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Protocol, TypeAlias

import torch
from torch import Tensor

from torch_tiers.migrator.timing import HookTime

if TYPE_CHECKING:
    from torch_tiers.migrator.engine.group import Claim, Group
    from torch_tiers.migrator.engine.mover import Mover
    from torch_tiers.migrator.hooks.actions import Action, Go
    from torch_tiers.migrator.hooks.saver import Saver
    from torch_tiers.migrator.hooks.sites import Place
    from torch_tiers.migrator.hooks.stack import Hooks
    from torch_tiers.migrator.recompute.dropped import Recomputed
    from torch_tiers.migrator.recording.recorder import Record


class Saved(Protocol):
    """A storage, or the part of one, that moves: where it lies within its group.

    Attributes
    ----------
    alias : Tensor
        Holds the program's memory until that is let go.
    group : Group
        The one it moves with.
    low, nbytes : int
        Which bytes of the storage: so many from byte `low` on.
    offset : int
        Of its first byte in the group; -1 until the group leaves.
    """

    alias: Tensor
    offset: int

    @property
    def group(self) -> Group: ...  # noqa: D102
    @property
    def low(self) -> int: ...  # noqa: D102
    @property
    def nbytes(self) -> int: ...  # noqa: D102


class Moved(Protocol):
    """What the graph holds in place of a saved tensor that moves. There may be weak references to it.

    Attributes
    ----------
    mover : Mover
        Who took it.
    saved : Saved
        The memory it is on.
    go : Go or None
        What the plan says of the site.
    record : Record or None
        If the period is recorded.
    was_used : bool
        Whether backward has asked for it.
    counter : Tensor
        Without memory. It shares the saved tensor's version counter: tensors that `saved` stands for may have several.
    version : int
        What the counter said when it was saved.
    dtype, size
        The saved tensor's.
    """

    was_used: bool

    @property
    def mover(self) -> Mover: ...  # noqa: D102
    @property
    def saved(self) -> Saved: ...  # noqa: D102
    @property
    def go(self) -> Go | None: ...  # noqa: D102
    @property
    def record(self) -> Record | None: ...  # noqa: D102
    @property
    def counter(self) -> Tensor: ...  # noqa: D102
    @property
    def version(self) -> int: ...  # noqa: D102
    @property
    def dtype(self) -> torch.dtype: ...  # noqa: D102
    @property
    def size(self) -> torch.Size: ...  # noqa: D102

    def changed(self) -> bool:
        """Whether what was saved has been changed in place since."""

    def view(self, buffer: Tensor | None) -> Tensor:
        """The tensor, on the buffer of its group or, without one, on the program's own memory."""


class Known(Protocol):
    """The bytes ``[low, high)`` of a storage, as they were at one version of a version counter, or of several.

    Attributes
    ----------
    ident : int
        Number within the period.
    cdata : int
        Identity of the storage, good for as long as this object lives: it holds a weak reference to it.
    saved : Saved or None
        Where it moves, if it does.
    made : weak reference or None
        How it is recomputed, if it is dropped.
    """

    saved: Saved | None
    made: weakref.ref[Recomputed] | None

    @property
    def ident(self) -> int: ...  # noqa: D102
    @property
    def low(self) -> int: ...  # noqa: D102
    @property
    def high(self) -> int: ...  # noqa: D102
    @property
    def cdata(self) -> int: ...  # noqa: D102

    def freed(self) -> bool:
        """Whether the program's memory is gone."""


class Storages(Protocol):
    """The storages that a period has saved so far: what has been saved before is not saved again."""

    def find(self, tensor: Tensor) -> Known:
        """What is known of the bytes that `tensor` needs; made on first sight."""


_Saved: TypeAlias = Saved  # within `Tensors` these names are those of its functions
_Moved: TypeAlias = Moved
_Storages: TypeAlias = Storages


class Tensors(Protocol):
    """The module."""

    def Saved(self, group: Group, tensor: Tensor, low: int, nbytes: int) -> _Saved:
        """Hold `nbytes` bytes of a tensor's storage, from byte `low` on, for a group that is filling."""

    def Moved(
        self, tensor: Tensor, mover: Mover, saved: _Saved, claim: Claim, go: Go | None, record: Record | None
    ) -> _Moved:
        """Stand in for a tensor; `claim` keeps the group from being forgotten, and is never looked at."""

    def Storages(self) -> _Storages:
        """Know of no storage yet."""

    def memory_of(self, tensor: Tensor, least: int) -> int:
        """The identity of the storage of a tensor that may move: one of at least so many bytes. 0 if it may not.

        It must be nothing but strided memory, and no view of a parameter.
        """

    def arrange(self, members: list[_Saved]) -> int:
        """Give each member its place in the group; the bytes of all, with those between them."""

    def spans(self, members: list[_Saved], address: int) -> bytes:
        """Where each member goes, in a block at `address`, where from, and its bytes: three numbers of 64 bits."""

    def let_go(self, members: list[_Saved]) -> None:
        """Let go of the memory of what is saved."""

    def hooks(self, saver: Saver, place: Place[Action], least: int) -> Hooks:
        """What PyTorch is to call for `saver`: a shortcut in front of its own methods.

        That goes by where the thread is, and by that storages of fewer than `least` bytes stay.
        """

    def counter(self, tensor: Tensor) -> Tensor:
        """Shares the version counter of a tensor, and has no memory."""

    def view(
        self, counter: Tensor, whole: Tensor, dtype: torch.dtype, size: torch.Size, stride: tuple[int, ...], first: int
    ) -> Tensor:
        """A tensor on the memory of `whole`, from element `first` on, that shares the version counter of `counter`.

        Changes in place are noticed there.
        """

    def spent(self) -> HookTime:
        """What hooks have taken so far in this process."""

    def charge(self, kind: int) -> int:
        """What a thread does from now on within a hook is of that field of `HookTime`; the one that it was of.

        4, one more than the last field's, stands for none: nothing is counted then.
        """
