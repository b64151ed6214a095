"""A group: storages that are offloaded and prefetched together, and the references to them.

The states of a group::

    FILLING   its storages are collected; they lie where the program made them
    LEAVING   the copy to DRAM is under way; the program's memory is still held, so a tensor that is
              needed now is simply handed back
    AWAY      the program's memory was released; the bytes lie in the group's `stored`
    HOME      one buffer in HBM holds, or is about to hold, all of it; its tensors are views of it
    GONE      nobody refers to it any more

References point upwards only. What the graph holds (`Moved`) refers to a `Saved`, that to its group. A group knows its
members, never who asked for them. So when the graph dies, all of it dies by reference count.

All that a graph holds of one group shares a `Claim`, so that the engine learns of a group's death once. That may happen
anywhere, also while the engine holds its lock. Therefore the death is only appended to `Engine.dead`, where the engine
looks when it is next called. No Python function runs then: an exception that a signal handler raises, such as for
Ctrl-C, would be raised in it first, and Python drops what a callback raises.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from torch_tiers.migrator.offload.direct.stored import DirectStoredGroup
from torch_tiers.migrator.offload.stored import StoredGroup
from torch_tiers.migrator.streams import Stream

NEVER = 1 << 61  # `Group.next_use` of what backward is known not to ask for


class State(enum.Enum):
    """Where a group is; see the module's docstring."""

    FILLING = enum.auto()
    LEAVING = enum.auto()
    AWAY = enum.auto()
    HOME = enum.auto()
    GONE = enum.auto()


class Claim:
    """A reference to a group that all its saved tensors share; the group dies with it."""

    __slots__ = ("__weakref__",)


class ClaimOn(weakref.ref[Claim]):
    """A weak reference to a claim that knows its group; it is appended to `Engine.dead` once the claim has died."""

    __slots__ = ("group",)
    group: Group


def unclaimed() -> None:
    """Stand for a reference to no claim."""


class Saved(Protocol):
    """A storage, or a part of one, that moves with a group.

    Attributes
    ----------
    alias : Tensor
        Holds the program's memory until that is released.
    group : Group
        The group it moves with.
    low, nbytes : int
        Which bytes of the storage: `nbytes` from byte `low` on.
    offset : int
        Position of its first byte in the group; -1 until the group leaves.
    """

    alias: torch.Tensor
    offset: int

    @property
    def group(self) -> Group: ...  # noqa: D102
    @property
    def low(self) -> int: ...  # noqa: D102
    @property
    def nbytes(self) -> int: ...  # noqa: D102


@dataclass(eq=False, slots=True)
class Group:
    """Storages that are offloaded and prefetched together.

    Attributes
    ----------
    next_use : int
        Groups are prefetched in ascending order of it.
    claim : weak reference
        To the claim of the saved tensors that refer to the group, if there are any.
    claims : int
        Claims whose death the engine has not noticed; two if one was made just after the last died.
    unused : int
        Saved tensors that backward has not asked for yet.
    members : list of Saved
        References that hold the program's memory; empty once it was released.
    """

    next_use: int
    stream: Stream  # of all its members; releases their memory, and owns the buffer's
    state: State = State.FILLING
    nbytes: int = 0
    claim: Callable[[], Claim | None] = unclaimed
    claims: int = 0
    unused: int = 0
    members: list[Saved] = field(default_factory=list)
    counted: int = 0  # its bytes in `Occupancy.resident`
    stored: StoredGroup | DirectStoredGroup | None = None
    buffer: torch.Tensor | None = None
    ready_on: list[Stream] = field(default_factory=list)  # streams that have waited for the buffer's copy
    bring_at: int = -1  # position from which it may come back
    tier: str | None = None  # where it is to go
    told: int = 0  # the number that the timeline tells it by
