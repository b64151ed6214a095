"""The errors that we raise on purpose.

The facts travel as ``args`` and the text is made from them, so an error survives pickling between processes.
"""

from __future__ import annotations

from torch_tiers.allocator.holders import Holder, describe_holders
from torch_tiers.allocator.sizes import format_size

_REMEDIES = {
    "make a file in": "name another directory (TIERS_NVME_PATH)",
    "open a file for cuFile in": 'name another directory (TIERS_NVME_PATH), or set nvme.gds to "prefer"',
    "read": (
        "what lay there is lost: look at dmesg, take that directory out of nvme.paths (TIERS_NVME_PATH) and go on from "
        "the last checkpoint"
    ),
}
"""Advice to the user, by what a store could not do. None for a write: the program still has the data."""


class TiersError(Exception):
    """Base of all errors that tell the user what happened and what to do."""


class TierFull(TiersError):
    """A tier has no room for a request.

    Parameters
    ----------
    tier
        ``"hbm"``, ``"dram"`` or ``"nvme"``.
    path
        Where the tier lives, if it has a place in a filesystem.
    requested, used, capacity
        Bytes.
    others
        Who else holds something of it, where that is what it lacks.
    """

    def __init__(
        self,
        tier: str,
        path: str | None,
        requested: int,
        used: int,
        capacity: int,
        others: tuple[Holder, ...] = (),
    ) -> None:
        super().__init__(tier, path, requested, used, capacity, others)
        self.tier = tier
        self.path = path
        self.requested = requested
        self.used = used
        self.capacity = capacity
        self.others = others

    def __str__(self) -> str:
        return (
            f"tier {self._where} is full: {format_size(self.requested)} requested, {format_size(self.used)} of "
            f"{format_size(self.capacity)} in use{self._held_elsewhere}; raise {self._variables}"
        )

    @property
    def _held_elsewhere(self) -> str:
        return f", held elsewhere on the node: {describe_holders(self.others)}" if self.others else ""

    @property
    def _where(self) -> str:
        return f"{self.tier} at {self.path}" if self.path else self.tier

    @property
    def _variables(self) -> str:
        return " or ".join(f"TIERS_{name.upper()}" for name in self.tier.split(" and "))


class TierTooSmall(TierFull):
    """A plan asks for more at once than a tier holds at all."""

    def __str__(self) -> str:
        return (
            f"the plan has {format_size(self.requested)} in {self._where} at once, which holds "
            f"{format_size(self.capacity)}{self._held_elsewhere}: raise {self._variables}, or TIERS_HBM, so that less "
            "has to move (TIERS_POLICY=auto moves no more than it must)"
        )


class StoreError(TiersError):
    """A store could not do what it was asked to.

    Parameters
    ----------
    path
        The file, or the directory that it was made in.
    offset, nbytes
        The range of the file, in bytes; `nbytes` is 0 where the action concerns the whole file.
    action
        ``"read"``, ``"write"``, ``"open"`` ...
    reason
        What the system said.
    """

    def __init__(self, path: str, offset: int, nbytes: int, action: str, reason: str) -> None:
        super().__init__(path, offset, nbytes, action, reason)
        self.path = path
        self.offset = offset
        self.nbytes = nbytes
        self.action = action
        self.reason = reason

    def __str__(self) -> str:
        what = f"{self.nbytes} bytes at offset {self.offset} of {self.path}" if self.nbytes else self.path
        remedy = _REMEDIES.get(self.action)
        return f"cannot {self.action} {what}: {self.reason}" + (f"; {remedy}" if remedy else "")


class CorruptionError(StoreError):
    """What came back from a store is not what was written; the data is not handed out."""
