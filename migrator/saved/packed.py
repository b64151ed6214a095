"""What the graph holds in place of a saved tensor, and the check that its version is still the one that was saved.

What stays is packed as a tuple, which costs least; what moves as a `Moved`, which lays claim to its group; what is made
again as a `Dropped`. Each holds an alias that shares the tensor's version counter.
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
    """Pack a tensor that stays."""
    alias = alias_of(tensor)
    return (alias, alias._version, stay, record)


def alias_of(tensor: Tensor) -> Tensor:
    """What the graph may hold for a tensor that stays.

    Not itself: for an output that would be a reference cycle. But what no graph made, as PyTorch does: what a program
    sets its `.data` to until backward is what backward uses, and what it had before is not held; and where a function
    returns it as a gradient, `.grad` gets memory of its own, as somebody holds this.
    """
    return tensor if tensor.is_leaf else tensor.detach()


def check(packed: Packed) -> None:
    """Raise PyTorch's own error if what was saved has been changed in place."""
    if isinstance(packed, tuple):
        alias, version, _, _ = packed
        if alias._version != version:
            raise modified(alias, alias.dtype, alias.size(), version)
        return
    if packed.changed():
        source = packed.made if isinstance(packed, Dropped) else packed
        raise modified(source.counter, packed.dtype, packed.size, source.version)


class Look:
    """Hands packed tensors out for a trial: nobody needs them, and all is to be as if they had not been asked for.

    What was dropped is recomputed once for all that is made from it here: a residual network's tensors have two ways
    to each that came before, and so 2 ** n to one n blocks away.
    """

    def __init__(self) -> None:
        self._made: dict[Recomputed, Tensor] = {}

    def __call__(self, packed: Packed) -> Tensor:
        """The tensor, bit for bit."""
        check(packed)
        if isinstance(packed, tuple):
            return packed[0]
        return packed.look(self, self._made) if isinstance(packed, Dropped) else packed.mover.glimpse(packed)


def in_a_fork(packed: Packed, there: dict[Recomputed, Tensor] | None = None) -> Tensor:
    """The tensor for the child of a fork, which has of its parent's threads and locks none that it could wait for.

    What is in memory is the child's as well; what is to be recomputed is made from that, once if `there` is handed on.

    Raises
    ------
    TiersError
        If it has left, which the parent alone can bring back.
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
    """PyTorch's own error for a saved tensor that was changed before backward used it; `more` follows its hint.

    `counter` shares its version counter, and may be of another type.
    """
    kind = torch.empty(0, dtype=dtype, device=counter.device).type()
    return RuntimeError(
        f"one of the variables needed for gradient computation has been {MODIFIED}: "
        f"[{kind} {list(size)}] is at version {counter._version}; expected version {version} instead. "
        "Hint: enable anomaly detection to find the operation that failed to compute its gradient, "
        f"with torch.autograd.set_detect_anomaly(True).{more and ' '}{more}"
    )
