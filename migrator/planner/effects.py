"""The effects of a choice: which storages are held from forward to backward, what is recomputed, and when.

A storage that is dropped is not held: it is recomputed, once, at its first use, and stays until its last. What it is
made from must be there by then. Pure functions on plain data.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from torch_tiers.migrator.model.trace import Site, Trace
from torch_tiers.migrator.planner.intervals import Bytes


class Unobtainable(ValueError):
    """A choice drops a storage that cannot be recomputed from what it leaves."""


@dataclass(slots=True)
class Held:
    """A storage that is held, in HBM or elsewhere.

    Attributes
    ----------
    ident, nbytes : int
        Which, and how large; 0 bytes if moving it is impossible or frees nothing.
    holders : list of Site
        The saved tensors on it, in the order of births.
    asked : list of int
        Positions at which it is needed: those of its holders, and those at which something is made from it.
    """

    ident: int
    nbytes: int
    holders: list[Site] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)

    @property
    def birth(self) -> int:
        """Position of the first save."""
        return self.holders[0].birth

    @property
    def complete(self) -> int:
        """Position of the last save."""
        return self.holders[-1].birth

    @property
    def leave(self) -> int:
        """Position at which the last of its holders is asked for."""
        if len(self.holders) == 1 and self.holders[0].uses:  # as of most; a search asks a hundred thousand times
            return self.holders[0].uses[-1]
        return max((holder.uses[-1] for holder in self.holders if holder.uses), default=self.birth)


@dataclass(frozen=True, slots=True)
class Work:
    """What is computed again at one position: how long it takes device and host, and the held storages it reads."""

    seconds: float
    inputs: tuple[int, ...]
    host: float = 0.0


@dataclass(frozen=True, slots=True)
class Effect:
    """What follows from dropping storages.

    Attributes
    ----------
    held : mapping of int to Held
        By storage, in the order of births.
    recomputed : tuple of str
        Keys of the sites whose storage is dropped.
    again : array of int
        Bytes, by stretch, that nobody holds and are there nevertheless: recomputed, or still being read.
    work : mapping of int to Work
        By position.
    """

    held: Mapping[int, Held]
    recomputed: tuple[str, ...]
    again: Bytes
    work: Mapping[int, Work]


def effect(trace: Trace, dropped: Collection[int] = ()) -> Effect:
    """What follows from recomputing the storages `dropped` of an iteration by their recipes.

    Raises
    ------
    Unobtainable
        If a recipe is missing, or one of its inputs is neither held nor dropped.
    """
    return _Builder(trace, dropped).build()


def obtainable(trace: Trace, dropped: Collection[int]) -> frozenset[int]:
    """The storages of `dropped` that can be recomputed when all the others of them are held."""
    seen = {site.storage for site in trace.sites}
    asked = sorted(set(dropped) & seen & trace.recipes.keys())
    there = seen - set(asked)
    lacks = {ident: set(trace.recipes[ident].inputs) - there for ident in asked}
    needed_for: dict[int, list[int]] = {}
    for ident, sources in lacks.items():
        for source in sources:
            needed_for.setdefault(source, []).append(ident)
    made, held = {ident for ident in asked if not lacks[ident]}, set[int]()
    new, rest = list(made), iter(asked)
    while True:
        while new:
            source = new.pop()
            for ident in needed_for.get(source, ()):
                lacks[ident].remove(source)
                if not lacks[ident] and ident not in held:
                    made.add(ident)
                    new.append(ident)
        stuck = next((ident for ident in rest if ident not in made), None)
        if stuck is None:
            return frozenset(made)
        held.add(stuck)
        new.append(stuck)


def scratch(trace: Trace, made: Mapping[int, int]) -> dict[int, int]:
    """By position, how much more HBM holds right after it because of what recomputing needs besides.

    `made` says where each storage is recomputed. One is after the other, and before the program asks for what it has
    in use in that stretch and had not in the one before.
    """
    most: dict[int, int] = {}
    for ident, at in made.items():
        most[at] = max(trace.recipes[ident].scratch, most.get(at, 0))
    others = trace.others
    to_come = {at: max(0, others[at + 1] - others[at]) if others else 0 for at in most}
    return {at: max(0, nbytes - to_come[at]) for at, nbytes in most.items()}


class _Builder:
    def __init__(self, trace: Trace, dropped: Collection[int]) -> None:
        self.trace = trace
        self.dropped = set(dropped)
        self.held: dict[int, Held] = {}
        self.recomputed: list[Site] = []
        self.uses: dict[int, list[int]] = {}  # of dropped storages
        self.made: dict[int, int] = {}  # dropped storage -> position at which it is made
        self.changes = np.zeros(trace.positions + 2, dtype=np.int64)
        self.seconds: dict[int, float] = {}
        self.host: dict[int, float] = {}
        self.inputs: dict[int, set[int]] = {}

    def build(self) -> Effect:
        nbytes = self.trace.storage_bytes
        for site in self.trace.sites:
            if site.storage in self.dropped:
                self.recomputed.append(site)
                self.uses.setdefault(site.storage, []).extend(site.uses)
                continue
            held = self.held.setdefault(site.storage, Held(site.storage, nbytes[site.storage]))
            held.holders.append(site)
            held.asked.extend(site.uses)
        self._drop()
        self._add_unkept()
        for held in self.held.values():
            # Read by what is recomputed after the last holder was asked for.
            held.asked.sort()
            if held.asked and held.asked[-1] > held.leave:
                self._there(held.leave + 2, held.asked[-1] + 2, held.nbytes)
        return Effect(
            held=self.held,
            recomputed=tuple(site.key for site in self.recomputed),
            again=np.cumsum(self.changes)[:-1],
            work={
                at: Work(seconds, tuple(sorted(self.inputs[at])), self.host[at])
                for at, seconds in sorted(self.seconds.items())
            },
        )

    def _drop(self) -> None:
        uses = self.uses
        first = {ident: min(at, default=self.trace.positions) for ident, at in uses.items()}
        for ident in sorted(uses, key=lambda ident: (first[ident], ident)):  # each is made early enough at once
            if ident not in self.trace.recipes:
                raise Unobtainable(f"storage {ident} is dropped, and the trace has no recipe for it")
            if uses[ident]:
                self._make(ident, first[ident])
        self._make_at_once()
        ran = set[int]()
        for ident, at in self.made.items():
            recipe = self.trace.recipes[ident]
            if recipe.call is None or recipe.call not in ran:
                self._work(at, recipe.seconds, recipe.inputs, recipe.host)
                ran |= set() if recipe.call is None else {recipe.call}
            for source in recipe.inputs:
                (uses[source] if source in uses else self.held[source].asked).append(at)
        for ident, at in self.made.items():
            self._there(at + 1, max(uses[ident]) + 2, self.trace.storage_bytes[ident])
        for at, nbytes in scratch(self.trace, self.made).items():
            self._there(at + 1, at + 2, nbytes)

    def _make_at_once(self) -> None:
        """What one operator returned is all made when the first of it is."""
        first: dict[int, int] = {}
        for ident, at in self.made.items():
            if (call := self.trace.recipes[ident].call) is not None:
                first[call] = min(at, first.get(call, at))
        for ident in self.made:
            if (call := self.trace.recipes[ident].call) is not None:
                self.made[ident] = first[call]

    def _add_unkept(self) -> None:
        """What nobody keeps lies in HBM all the same while the program works with it, or until it is made again."""
        born: dict[int, int] = {}
        for site in self.recomputed:
            born.setdefault(site.storage, site.birth)
        for ident, birth in born.items():
            end = min(self.trace.released_at[ident], self.made.get(ident, self.trace.positions) + 1)
            if end > birth + 1:
                self._there(birth + 1, end, self.trace.storage_bytes[ident])

    def _make(self, ident: int, at: int) -> None:
        """Note that a dropped storage is needed at a position, and so what it is made from."""
        above: dict[int, Iterator[int]] = {}  # what is being made, and which of its sources are still to come
        new: int | None = ident
        while new is not None or above:  # chains are as long as a program makes them: no recursion
            if new is not None:
                if new in above:
                    raise Unobtainable(f"storage {new} would be made from itself")
                if self.made.get(new, at + 1) > at:
                    self.made[new] = at
                    above[new] = iter(self.trace.recipes[new].inputs)
                new = None
                continue
            made = next(reversed(above))
            for source in above[made]:
                if source in self.held:
                    continue
                if source not in self.uses or source not in self.trace.recipes:
                    raise Unobtainable(f"storage {made} is made from {source}, which is neither held nor recomputed")
                new = source
                break
            else:
                del above[made]

    def _work(self, at: int, seconds: float, inputs: tuple[int, ...], host: float) -> None:
        self.seconds[at] = self.seconds.get(at, 0.0) + seconds
        self.host[at] = self.host.get(at, 0.0) + host
        self.inputs.setdefault(at, set()).update(ident for ident in inputs if ident in self.held)

    def _there(self, first: int, end: int, nbytes: int) -> None:
        self.changes[first] += nbytes
        self.changes[end] -= nbytes
