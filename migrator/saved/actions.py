"""The actions of a plan at single sites (keep, move, recompute), and what the graph holds for a moved tensor."""

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
from torch_tiers.migrator.recompute.replays import Peek, Replay
from torch_tiers.migrator.recompute.verified import Verified
from torch_tiers.migrator.recording.record import Record
from torch_tiers.migrator.recording.recorder import Recorder
from torch_tiers.migrator.recording.storages import Storages
from torch_tiers.migrator.saved.dropped import Dropped, Recomputed

Find: TypeAlias = Callable[[Verified, Tensor], "tuple[Replay, int] | None"]
"""What makes a tensor again, as far as it was verified; None if nothing does now."""


class Shapes(Protocol):
    """Tries recomputations; see `migrator.saved.spot_checks.Checks`."""

    refused: set[str]

    def try_shape(
        self, key: str, original: Tensor, made: Recomputed, verified: Verified, look: Callable[[], Peek]
    ) -> None:
        """Recompute a site's tensor if its shape came before, and was not tried."""


class Owner(Protocol):
    """Handles the saved tensors of one thread and device; see `migrator.saved.mover.Mover`."""

    engine: Engine
    recorder: Recorder | None
    storages: Storages
    verified: dict[str, Verified]

    @property
    def checks(self) -> Shapes: ...  # noqa: D102

    def take(self, tensor: Tensor, key: str, go: Go | None, kind: str = "") -> Moved:
        """Put a saved tensor into a group."""

    def drop(self, tensor: Tensor, make: Recompute, find: Find, kind: str) -> Dropped | Moved:
        """Drop a saved tensor that is recomputed later; put it into a group if the recomputation no longer holds."""

    def restore(self, moved: Moved, *, count: bool = True) -> Tensor:
        """Return the tensor that was taken, bit for bit, in HBM; with `count` this is a use by backward."""

    def glimpse(self, moved: Moved) -> Tensor:
        """Return the same tensor without bringing its group back for good."""


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
    """Move the tensor with this group."""

    mover: Owner
    group: PageGroup
    pace: Pace | None = None
    stays: ClassVar[Literal[False]] = False


@dataclass(frozen=True, slots=True)
class Recompute:
    """Drop the tensor saved at the site `key`, and recompute it in backward."""

    mover: Owner
    key: str
    verified: Verified
    pace: Pace | None = None
    stays: ClassVar[Literal[False]] = False


Action: TypeAlias = Stay | Go | Recompute


class Moved(Protocol):
    """The object that the graph holds in place of a moved tensor. It supports weak references.

    Attributes
    ----------
    mover : Owner
        The mover that took it.
    saved : Saved
        The memory that the tensor lies on.
    go : Go or None
        The plan's action for the site.
    record : Record or None
        Its record, if the iteration is recorded.
    was_used : bool
        Whether backward has asked for it.
    counter : Tensor
        Shares the tensor's version counter and has no memory. Tensors on one `saved` may have different counters.
    version : int
        The counter's value when the tensor was saved.
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
        """Return whether the tensor has been changed in place since it was saved."""

    def view(self, buffer: Tensor | None) -> Tensor:
        """Return the tensor as a view of its group's buffer; without a buffer, of the program's own memory."""
