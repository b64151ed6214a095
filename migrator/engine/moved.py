"""What a group holds of the program's memory, and what the graph holds in place of a tensor that moves.

`native/moved.h` is the same in C++.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torch_tiers.migrator.lanes import FULL_SPEED, SLOT

if TYPE_CHECKING:
    from torch_tiers.migrator.engine.group import Claim, Group
    from torch_tiers.migrator.engine.mover import Mover
    from torch_tiers.migrator.hooks.actions import Go
    from torch_tiers.migrator.recording.recorder import Record


class Saved:
    """A storage, or the part of one, that moves: where it lies within its group.

    Attributes
    ----------
    alias : Tensor
        Holds the program's memory until that is let go.
    low, nbytes : int
        Which bytes of the storage.
    offset : int
        In the group; set when the group leaves.
    """

    __slots__ = ("alias", "group", "low", "nbytes", "offset")

    def __init__(self, group: Group, tensor: Tensor, low: int, nbytes: int) -> None:
        self.group = group
        self.alias = tensor.detach()
        self.low = low
        self.nbytes = nbytes
        self.offset = -1


class Moved:
    """What the graph holds in place of a saved tensor that moves.

    Attributes
    ----------
    claim : object
        What keeps the group from being forgotten; held, and never looked at.
    go : Go or None
        What the plan says of the site.
    record : Record or None
        If the period is recorded.
    was_used : bool
        Whether backward has asked for it.
    counter : Tensor
        Without memory. It shares the saved tensor's version counter: tensors that `saved` stands for may have several.
    version : int
        What the counter said.
    """

    __slots__ = (
        "__weakref__",
        "_claim",
        "_first",
        "_stride",
        "counter",
        "dtype",
        "go",
        "mover",
        "record",
        "saved",
        "size",
        "version",
        "was_used",
    )

    def __init__(
        self, tensor: Tensor, mover: Mover, saved: Saved, claim: Claim, go: Go | None, record: Record | None
    ) -> None:
        self._claim = claim
        self.mover = mover
        self.go = go
        self.saved = saved
        self.record = record
        self.dtype = tensor.dtype
        self.size = tensor.size()
        self._stride = tensor.stride()
        self._first = int(tensor.storage_offset())  # in elements
        self.was_used = False
        self.counter = tensor.detach()
        self.version = self.counter._version
        self.counter.data = nothing(tensor.dtype, tensor.device)

    def changed(self) -> bool:
        """Whether what was saved has been changed in place since."""
        return self.counter._version != self.version

    def view(self, buffer: Tensor | None) -> Tensor:
        """The tensor, on the buffer of its group or, without one, on the program's own memory."""
        saved = self.saved
        if buffer is None:
            return view(self.counter, saved.alias.untyped_storage(), self.dtype, self._first, self.size, self._stride)
        first = self._first + (saved.offset - saved.low) // self.dtype.itemsize
        return view(self.counter, buffer.untyped_storage(), self.dtype, first, self.size, self._stride)


@cache
def nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor without memory."""
    return torch.empty(0, dtype=dtype, device=device)


def arrange(members: list[Saved]) -> int:
    """Give each member its place in the group; the bytes of all."""
    # Large members first, then the small ones side by side: a lane that cannot ask for all at once gathers those.
    members.sort(key=lambda saved: saved.nbytes < FULL_SPEED)
    offset = 0
    for saved in members:
        saved.offset = offset
        offset = -(-(offset + saved.nbytes) // SLOT) * SLOT  # `round_up`, and a third of its time
    return offset


def spans(members: list[Saved], address: int) -> bytes:
    """Where each member goes, in a block at `address`, where from, and its bytes: three numbers of 64 bits."""
    numbers: list[int] = []  # not yet an array, which takes six times as long to grow
    for saved in members:
        first = saved.alias.untyped_storage().data_ptr() + saved.low
        numbers += (address + saved.offset, first, saved.nbytes)
    return array("Q", numbers).tobytes()


def let_go(members: list[Saved], empty: Callable[[torch.dtype], Tensor]) -> None:
    """Let go of the memory of what is saved. `empty` makes tensors without memory."""
    for saved in members:
        alias = saved.alias
        alias.data = empty(alias.dtype)


_below_autograd = torch._C._AutoDispatchBelowADInplaceOrView


def view(
    alias: Tensor,
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    first: int,
    size: torch.Size,
    stride: tuple[int, ...],
) -> Tensor:
    """A tensor on `storage` that shares the version counter of `alias`: changes in place are noticed there."""
    tensor = alias.detach()
    if tensor.dtype is dtype:
        with _below_autograd():  # where nothing counts as a change in place
            tensor.set_(storage, first, size, stride)
    else:
        tensor.data = torch.empty(0, dtype=dtype, device=storage.device).set_(storage, first, size, stride)
    return tensor
