"""What the C++ part of the hooks does with the memory of saved tensors, as the engine needs it.

Types only: who needs the module is given it, as `Tensors`.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from torch_tiers.migrator.offload.group import Group, Saved

_Saved = Saved  # within `Tensors` that name is its function's


class Tensors(Protocol):
    """The module, as far as it knows of groups alone."""

    def Saved(self, group: Group, tensor: Tensor, low: int, nbytes: int) -> _Saved:
        """Hold `nbytes` bytes of a tensor's storage, from byte `low` on, for a group that is filling."""

    def arrange(self, members: list[_Saved]) -> int:
        """Give each member its place in the group; the bytes of all, with those between them."""

    def spans(self, members: list[_Saved], address: int) -> bytes:
        """Where each member goes, in a block at `address`, where from, and its bytes: three numbers of 64 bits."""

    def release(self, members: list[_Saved]) -> None:
        """Release the memory of what is saved."""

    def counter(self, tensor: Tensor) -> Tensor:
        """Shares the version counter of a tensor, and has no memory."""

    def view(
        self, counter: Tensor, whole: Tensor, dtype: torch.dtype, size: torch.Size, stride: tuple[int, ...], first: int
    ) -> Tensor:
        """A tensor on the memory of `whole`, from element `first` on, that shares the version counter of `counter`.

        Changes in place are noticed there.
        """

    def charge(self, kind: int) -> int:
        """What a thread does from now on within a hook is of that field of `HookTime`; the one that it was of.

        4, one more than the last field's, stands for none: nothing is counted then.
        """
