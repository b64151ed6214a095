"""Who holds how much of a tier: what a refused claim and an error about a full tier report."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch_tiers.allocator.sizes import format_size

_NAMED = 4  # holders, the largest; of the others their number


class Holder(NamedTuple):
    """A process that holds something of a tier, as it calls itself."""

    nbytes: int
    pid: int
    program: str


class Held(NamedTuple):
    """What was held of a tier as a process claimed more of it.

    Attributes
    ----------
    wanted : int
        Bytes that were claimed.
    held : int
        Bytes that this process held before, in all of its accounts.
    others : tuple of Holder
        Who else held something.
    """

    wanted: int
    held: int
    others: tuple[Holder, ...]

    @property
    def by_others(self) -> int:
        """Bytes that others held."""
        return sum(holder.nbytes for holder in self.others)


class Claims:
    """What a process met as it claimed a tier: who held how much when it was short, and at its most.

    Attributes
    ----------
    shortages : int
        Claims that were not granted in full.
    shortest : Held or None
        The one of these at which others held most.
    fullest : Held or None
        The claim after which the process held most.
    no_room : str
        Why the system left nothing, when it last did not; empty if it always left something.
    told : callable or None
        Called at each shortage at which others did not hold what they did at the one before: with ``bytes`` that were
        claimed and ``held``, and a text about the ``others``.
    """

    def __init__(self) -> None:
        self.shortages = 0
        self.shortest: Held | None = None
        self.fullest: Held | None = None
        self.no_room = ""
        self.told: Callable[..., None] | None = None
        self._last: tuple[Holder, ...] | None = None

    def claimed(self, granted: int, wanted: int, held: int, others: Iterable[Holder]) -> None:
        """So much was granted of what was `wanted` while so much was `held`, and what others did."""
        others, own = tuple(others), os.getpid()
        held += sum(one.nbytes for one in others if one.pid == own)
        now = Held(wanted, held, tuple(sorted((one for one in others if one.pid != own), reverse=True)))
        if granted and (self.fullest is None or held + granted > self.fullest.held + self.fullest.wanted):
            self.fullest = now._replace(wanted=granted)
        if granted >= wanted:
            return
        self.shortages += 1
        if self.shortest is None or now.by_others > self.shortest.by_others:
            self.shortest = now
        if self.told is not None and now.others != self._last:
            self._last = now.others
            self.told(bytes=wanted, held=held, others=describe_holders(now.others))

    def to_json(self) -> dict[str, Any]:
        """What a run keeps of it: numbers of bytes, and at most `_NAMED` holders each time."""
        return {
            "shortages": self.shortages,
            "shortest": _to_json(self.shortest),
            "fullest": _to_json(self.fullest),
            "no_room": self.no_room,
        }


def _to_json(held: Held | None) -> dict[str, Any] | None:
    if held is None:
        return None
    named = [one._asdict() for one in held.others[:_NAMED]]
    return {"wanted": held.wanted, "held": held.held, "by_others": held.by_others, "others": named}


def describe_holders(holders: Iterable[Holder]) -> str:
    """Say who holds how much, the largest first."""
    largest = sorted(holders, reverse=True)
    texts = [f"{format_size(nbytes)} by {_named(pid, program)}" for nbytes, pid, program in largest[:_NAMED]]
    return ", ".join(texts) + (f" and more by {len(largest) - _NAMED} others" if len(largest) > _NAMED else "")


def _named(pid: int, program: str) -> str:
    return f"this process, pid {pid}" if pid == os.getpid() else f"pid {pid} ({program})"
