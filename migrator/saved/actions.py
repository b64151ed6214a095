"""What a plan says of a site, and what the graph holds of a tensor that goes; both know whose it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from torch_tiers.migrator.model.plan import PageGroup
from torch_tiers.migrator.offload.engine import Engine
from torch_tiers.migrator.offload.group import Saved
from torch_tiers.migrator.planner.paces import Pace
from torch_tiers.migrator.recompute.replays import Replay
from torch_tiers.migrator.recompute.verified import Verified
from torch_tiers.migrator.recording.record import Record
from torch_tiers.migrator.recording.recorder import Recorder
from torch_tiers.migrator.recording.storages import Storages
from torch_tiers.migrator.saved.dropped import Dropped

Find: TypeAlias = Callable[[Verified, Tensor], "tuple[Replay, int] | None"]
"""What makes a tensor again, as far as it was verified; None if nothing does now."""


class Owner(Protocol):
    """Who takes charge of saved tensors of one thread and device, and gives them back."""

    engine: Engine
    recorder: Recorder | None
    storages: Storages

    def take(self, tensor: Tensor, key: str, go: Go | None, kind: str = "") -> Moved:
        """Take charge of a saved tensor."""

    def drop(self, tensor: Tensor, make: Recompute, find: Find, kind: str) -> Dropped | Moved:
        """Release a saved tensor that is made again; where that does not hold any more, take it."""

    def restore(self, moved: Moved, *, count: bool = True) -> Tensor:
        """The tensor that was taken, bit for bit, in HBM; with `count` backward has asked for it."""

    def glimpse(self, moved: Moved) -> Tensor:
        """The same tensor for somebody who only looks."""


@dataclass(frozen=True, slots=True)
class Stay:
    """Keep the tensor in HBM.

    Attributes
    ----------
    enter, leave : int
        Bytes that enter HBM when the tensor is saved, and leave it after its last use.
    bypass : bool
        Whether the hooks need not be called for it.
    """

    mover: Owner
    enter: int
    leave: int
    pace: Pace | None = None
    bypass: bool = False
    stays: ClassVar[Literal[True]] = True


@dataclass(frozen=True, slots=True)
class Go:
    """Go, with this group."""

    mover: Owner
    group: PageGroup
    pace: Pace | None = None
    stays: ClassVar[Literal[False]] = False


@dataclass(frozen=True, slots=True)
class Recompute:
    """Drop what is saved at the site `key`, and make it again."""

    mover: Owner
    key: str
    verified: Verified
    pace: Pace | None = None
    stays: ClassVar[Literal[False]] = False


Action: TypeAlias = Stay | Go | Recompute


class Moved(Protocol):
    """What the graph holds in place of a saved tensor that moves. There may be weak references to it.

    Attributes
    ----------
    mover : Owner
        Who took it.
    saved : Saved
        The memory it is on.
    go : Go or None
        What the plan says of the site.
    record : Record or None
        If the iteration is recorded.
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
    def mover(self) -> Owner: ...  # noqa: D102
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
