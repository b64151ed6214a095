"""What the graph holds in place of a saved tensor, and the check that its version is still the one that was saved.

What stays is packed as a tuple, which costs least; what moves as a `Moved`, which lays claim to its group; what is made
again as a `Dropped`. Each holds an alias that shares the tensor's version counter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from migrator.actions import Go, Stay
from migrator.engine import Claim, Saved
from migrator.remake import Dropped

if TYPE_CHECKING:
    from migrator.mover import Mover
    from migrator.recorder import Record


class Moved:
    """What the graph holds in place of a saved tensor that moves."""

    __slots__ = (
        "__weakref__",
        "_claim",
        "dtype",
        "first",
        "go",
        "mover",
        "record",
        "saved",
        "size",
        "stride",
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
        self.stride = tensor.stride()
        self.first = int(tensor.storage_offset())  # in elements
        self.was_used = False


Kept: TypeAlias = "tuple[Tensor, int, Stay | None, Record | None]"
"""What the graph holds for one that stays: alias, version, what the plan says, and its record."""

Packed: TypeAlias = "Kept | Moved | Dropped"


def keep(tensor: Tensor, stay: Stay | None = None, record: Record | None = None) -> Kept:
    """Pack a tensor that stays."""
    alias = tensor.detach()  # not the tensor: for an output that would be a reference cycle
    return (alias, alias._version, stay, record)


def check(packed: Packed) -> None:
    """Raise PyTorch's own error if what was saved has been changed in place."""
    if isinstance(packed, tuple):
        alias, version, _, _ = packed
        if alias._version != version:
            raise modified(alias, alias.dtype, alias.size(), version)
        return
    source = packed.saved if isinstance(packed, Moved) else packed.made
    if source.alias._version != source.version:
        raise modified(source.alias, packed.dtype, packed.size, source.version)


def modified(alias: Tensor, dtype: torch.dtype, size: torch.Size, version: int) -> RuntimeError:
    """PyTorch's own error for a saved tensor that was changed before backward used it."""
    kind = torch.empty(0, dtype=dtype, device=alias.device).type()  # the alias may be empty, and of another type
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{kind} {list(size)}] is at version {alias._version}; expected version {version} instead. "
        "Hint: enable anomaly detection to find the operation that failed to compute its gradient, "
        "with torch.autograd.set_detect_anomaly(True)."
    )
