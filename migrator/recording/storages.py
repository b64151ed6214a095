"""The storages that an iteration saves. Types only: the C++ part of the hooks makes them."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

from torch import Tensor

from torch_tiers.migrator.offload.group import Saved


class Known(Protocol):
    """The bytes ``[low, high)`` of a storage, as they were at one version of a version counter, or of several.

    Attributes
    ----------
    ident : int
        Number within the iteration.
    cdata : int
        Identity of the storage, good for as long as this object lives: it holds a weak reference to it.
    saved : Saved or None
        Where it moves, if it does.
    made : weak reference or None
        How it is recomputed, if it is dropped.
    """

    saved: Saved | None
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
        """Whether the program's memory is gone."""


class Storages(Protocol):
    """The storages that an iteration has saved so far: what has been saved before is not saved again."""

    def find(self, tensor: Tensor) -> Known:
        """What is known of the bytes that `tensor` needs; made on first sight."""
