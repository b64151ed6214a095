"""The objects that the autograd graph holds in place of saved tensors, and the check for in-place modification.

A tensor that stays in HBM is packed as a tuple, which is cheapest. One that moves is packed as a `Moved`, one that is
recomputed as a `Dropped`. Each holds an alias that shares the tensor's version counter.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

from torch_tiers.allocator.errors import TiersError
from torch_tiers.migrator.offload.group import State
from torch_tiers.migrator.recompute.replays import MODIFIED
from torch_tiers.migrator.recording.record import Record
from torch_tiers.migrator.saved.actions import Moved, Stay
from torch_tiers.migrator.saved.dropped import Dropped, Recomputed

Kept: TypeAlias = "tuple[Tensor, int, Stay | None, Record | None]"
"""What the graph holds for one that stays: alias, version, what the plan says, and its record."""

Packed: TypeAlias = "Kept | Moved | Dropped"


def keep(tensor: Tensor, stay: Stay | None = None, record: Record | None = None) -> Kept:
    """Pack a tensor that stays in HBM."""
    alias = alias_of(tensor)
    return (alias, alias._version, stay, record)


def alias_of(tensor: Tensor) -> Tensor:
    """Return what the graph may hold for a tensor that stays in HBM.

    An output's own tensor would form a reference cycle, so a detached alias is held instead. A leaf is held itself, as
    PyTorch does: if the program sets its `.data` before backward, backward uses that, and the old memory is not held;
    and if a function returns the leaf as a gradient, `.grad` gets memory of its own.
    """
    return tensor if tensor.is_leaf else tensor.detach()


def check(packed: Packed) -> None:
    """Raise PyTorch's own error if the saved tensor has been changed in place."""
    if isinstance(packed, tuple):
        alias, version, _, _ = packed
        if alias._version != version:
            raise modified(alias, alias.dtype, alias.size(), version)
        return
    if packed.changed():
        source = packed.made if isinstance(packed, Dropped) else packed
        raise modified(source.counter, packed.dtype, packed.size, source.version)


def peek(packed: Packed) -> Tensor:
    """Return a saved tensor from which another is recomputed, without counting that as a use by backward."""
    check(packed)
    if isinstance(packed, tuple):
        return packed[0]
    if isinstance(packed, Dropped):
        return packed.view(peek, count=False)
    return packed.mover.restore(packed, count=False)


class Look:
    """Returns packed tensors for a trial recomputation, without side effects on groups or counts.

    A dropped tensor is recomputed once for all that is recomputed from it here. A residual network has two paths from
    each tensor to the one before, and so 2 ** n paths to the one n blocks before.
    """

    def __init__(self) -> None:
        self._made: dict[Recomputed, Tensor] = {}

    def __call__(self, packed: Packed) -> Tensor:
        """Return the tensor, bit for bit."""
        check(packed)
        if isinstance(packed, tuple):
            return packed[0]
        return packed.look(self, self._made) if isinstance(packed, Dropped) else packed.mover.glimpse(packed)


def in_a_fork(packed: Packed, there: dict[Recomputed, Tensor] | None = None) -> Tensor:
    """Return the tensor in a forked child process, which cannot use its parent's threads and locks.

    Tensors in memory are the child's, too. Dropped tensors are recomputed from them, once for all that share `there`.

    Raises
    ------
    TiersError
        If the tensor was offloaded: only the parent can restore it.
    """
    check(packed)
    if isinstance(packed, tuple):
        return packed[0]
    if isinstance(packed, Dropped):
        made: dict[Recomputed, Tensor] = {} if there is None else there
        return packed.look(lambda source: in_a_fork(source, made), made)
    if packed.saved.group.state not in (State.FILLING, State.LEAVING):
        raise TiersError(
            "backward needs a saved tensor that lies in dram or nvme, and cannot be brought back in a forked process: "
            "run forward and backward in the same process, or have processes started by spawn"
        )
    return packed.view(None)


def modified(counter: Tensor, dtype: torch.dtype, size: torch.Size, version: int, more: str = "") -> RuntimeError:
    """Return PyTorch's own error for a saved tensor that was changed before backward used it; `more` follows its hint.

    `counter` shares the tensor's version counter, and may be of another type.
    """
    kind = torch.empty(0, dtype=dtype, device=counter.device).type()
    return RuntimeError(
        f"one of the variables needed for gradient computation has been {MODIFIED}: "
        f"[{kind} {list(size)}] is at version {counter._version}; expected version {version} instead. "
        "Hint: enable anomaly detection to find the operation that failed to compute its gradient, "
        f"with torch.autograd.set_detect_anomaly(True).{more and ' '}{more}"
    )
