"""The interface of the C++ part of the hooks that handles the memory of groups.

Whoever needs the module receives it as `Tensors`.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, TypeVar, cast

import torch
from torch import Tensor

from torch_tiers.migrator.model.timing import HookTime
from torch_tiers.migrator.offload.group import Group, Saved
from torch_tiers.migrator.offload.occupancy import Occupancy

_GROUPS = HookTime._fields.index("groups")
_Saved: TypeAlias = Saved  # within `Tensors` these names are those of its functions
_Occupancy: TypeAlias = Occupancy


class Tensors(Protocol):
    """The C++ module, as far as it handles groups."""

    def Saved(self, group: Group, tensor: Tensor, low: int, nbytes: int) -> _Saved:
        """Hold `nbytes` bytes of a tensor's storage, from byte `low` on, for a group that is filling."""

    def Occupancy(self, leaving: dict[Group, None], order: deque[Group]) -> _Occupancy:
        """Count what is in HBM: nothing yet. It looks whether there are groups in `leaving`, and in `order`."""

    def arrange(self, members: list[_Saved]) -> int:
        """Give each member its place in the group; return the bytes of all, with those between them."""

    def spans(self, members: list[_Saved], address: int) -> bytes:
        """Return target address, source address and size of each member for a block at `address`, in 64 bits each."""

    def release(self, members: list[_Saved]) -> None:
        """Release the program's memory of the members."""

    def counter(self, tensor: Tensor) -> Tensor:
        """Return a tensor without memory that shares a tensor's version counter."""

    def view(
        self, counter: Tensor, whole: Tensor, dtype: torch.dtype, size: torch.Size, stride: tuple[int, ...], first: int
    ) -> Tensor:
        """Return a tensor on the memory of `whole`, from element `first` on.

        It shares the version counter of `counter`, so changes in place are noticed there.
        """

    def charge(self, kind: int) -> int:
        """Charge this thread's time within a hook to another field of `HookTime`; return the one charged before.

        4, one more than the last field's number, stands for none: nothing is counted then.
        """


Method = TypeVar("Method", bound=Callable[..., None])


def for_a_group(method: Method) -> Method:
    """Count the host's time in a method as spent for a group, not for the tensor whose hook called it.

    The method's object has the C++ module as its `tensors`.
    """

    @functools.wraps(method)
    def charged(self: Any, *args: Any, **kwargs: Any) -> None:
        before = self.tensors.charge(_GROUPS)
        try:
            method(self, *args, **kwargs)
        finally:
            self.tensors.charge(before)

    return cast("Method", charged)
