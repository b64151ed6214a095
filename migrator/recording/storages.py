"""The storages that an iteration saves. Types only: the C++ part of the hooks implements them."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

from torch import Tensor

from torch_tiers.migrator.offload.group import Saved


class Known(Protocol):
    """The bytes ``[low, high)`` of a storage, at one version of a version counter, or of several.

    Attributes
    ----------
    ident : int
        Number within the iteration.
    cdata : int
        Identity of the storage, valid as long as this object lives: it holds a weak reference to the storage.
    saved : Saved or None
        Its place in a group, if it moves.
    operation : int
        The operation that saved the tensor for which the copy was taken; `ANY` of `saved.parts` if any may share it.
    made : weak reference or None
        Its recomputation, if it is dropped.
    """

    saved: Saved | None
    operation: int
    made: weakref.ref[Any] | None

    @property
    def ident(self) -> int: ...  # noqa: D102
    @property
    def low(self) -> int: ...  # noqa: D102
    @property
    def high(self) -> int: ...  # noqa: D102
    @property
    def cdata(self) -> int: ...  # noqa: D102

    def freed(self) -> bool:
        """Return whether the program's memory is freed."""


class Storages(Protocol):
    """The storages that an iteration has saved so far; a storage is saved once."""

    def find(self, tensor: Tensor) -> Known:
        """Return the entry of the bytes that `tensor` needs; make it at first sight."""
