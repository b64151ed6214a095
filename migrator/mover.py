"""One device's share of a thread's program: gathers what a period saves into groups, and gives it back.

Stands between the hooks, which see one tensor at a time, and the engine, which sees groups.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from allocator.errors import TierFull
from migrator.engine import EVERY, NEVER, Engine, Group, State
from migrator.hooks import Moved
from migrator.lanes import Stream
from migrator.learner import Learner
from migrator.links import Links
from migrator.plan import PageGroup, Plan, group_bytes, learning_room
from migrator.recorder import Recorder
from migrator.storages import Storages

log = logging.getLogger("tiers")

UNFORESEEN = 1 << 60
"""Groups that no plan orders are expected back last in, first out, and after all that a plan orders."""


@dataclass(frozen=True, slots=True)
class Stay:
    """The plan's word for a site: stay; with the bytes that enter and leave HBM by it."""

    mover: Mover
    enter: int
    leave: int
    stays: ClassVar[Literal[True]] = True


@dataclass(frozen=True, slots=True)
class Go:
    """The plan's word for a site: go, with this group."""

    mover: Mover
    group: PageGroup
    stays: ClassVar[Literal[False]] = False


@dataclass(slots=True)
class _Open:
    """A planned group that is filling in this period."""

    group: Group
    missing: int


class Mover:
    """Carries the plans for one device out.

    Parameters
    ----------
    engine : Engine
        The device's engine.
    learner : Learner
        Decides what is recorded and planned.
    budget : int
        HBM budget, in bytes.
    """

    def __init__(self, engine: Engine, learner: Learner, budget: int) -> None:
        self.engine = engine
        self.learner = learner
        self.budget = budget
        self.unmanaged = 0  # bytes that backward needs and no hook was told of
        self.storages = Storages()
        self._outlived: set[str] = set()
        self.recorder: Recorder | None = Recorder(self._outlived)
        self._room = learning_room(budget)
        self._open: dict[tuple[PageGroup, Stream], _Open] = {}
        self._opened: set[PageGroup] = set()
        self._completed: set[PageGroup] = set()
        self._loose: dict[Stream, Group] = {}
        self._loose_made = 0
        self._unforeseen = False
        self._taken = 0  # storages, in this period
        self._full_said = False
        self._allocated_before = engine.compute.allocated()
        engine.limit = self._room

    # -------------------------------------------------------------------------------------- out

    def take(self, tensor: Tensor, storage: torch.UntypedStorage, key: str, go: Go | None) -> Moved:
        """Take charge of a saved tensor.

        Raises
        ------
        TierFull
            If the plan has it leave HBM and no tier has room.
        """
        with self.engine.lock:
            known = self.storages.find(tensor, storage, tensor._version)
            record = None if self.recorder is None else self.recorder.save(key, known)
            if go is None and self.recorder is None:
                self._unforeseen = True
            stream = self.engine.compute.stream()
            if known.saved is None or known.saved.group.state is State.GONE:
                known.saved = self.engine.add(self._group(go, stream), _flat(storage, known.low, known.high))
                self._taken += 1
            saved, alias = known.saved, tensor.detach()
            self.engine.hold(saved, alias)
            first_byte = int(tensor.storage_offset()) * tensor.itemsize - known.low
            moved = Moved(tensor, alias, self, saved, first_byte, record)
            if go is not None:
                self._arrived(go.group, stream)
            self._send_loose(stream)
        return moved

    def _group(self, go: Go | None, stream: Stream) -> Group:
        """The group that the next tensor goes into: the plan's, or one for what no plan has foreseen.

        A group takes members of one stream only: its copy waits for that one, and that one lets go of
        their memory.
        """
        # While the plan does not hold (groups wait for sites that do not come, and the limit is reached) what comes
        # travels with the unforeseen, in groups that leave as soon as they are worth a transfer.
        if go is not None and not self.engine.over_limit():
            return self._filling(go.group, stream).group
        group = self._loose.get(stream)
        if group is None or group.state is State.GONE:
            self._loose_made += 1
            group = self._loose[stream] = Group(UNFORESEEN - self._loose_made, stream)
        return group

    def _filling(self, planned: PageGroup, stream: Stream) -> _Open:
        filling = self._open.get((planned, stream))
        if filling is None:
            self._opened.add(planned)
            filling = _Open(_planned_group(planned, stream), len(planned.sites))
            self._open[planned, stream] = filling
        elif filling.group.state is State.GONE:  # all that was in it died before it was complete
            filling.group = _planned_group(planned, stream)
        return filling

    def _arrived(self, planned: PageGroup, stream: Stream) -> None:
        filling = self._filling(planned, stream)
        filling.missing -= 1
        if not filling.missing:
            self._completed.add(planned)
            # Groups that should have been complete before it wait for a branch that was not taken.
            for key in [key for key in self._open if key[0].last_birth <= planned.last_birth]:
                self.engine.send(self._open.pop(key).group)

    def _send_loose(self, stream: Stream) -> None:
        group = self._loose.get(stream)
        if group is None or group.nbytes < group_bytes(self._room):
            return
        del self._loose[stream]
        try:
            self.engine.send(group)
        except TierFull as full:
            # No plan asked for this one to go, so it may stay: the program may well fit.
            if not self._full_said:
                self._full_said = True
                # Its text only: a handler that keeps the exception keeps its frames, and their tensors.
                log.warning("%s; what no plan has foreseen stays in hbm", str(full))

    # ------------------------------------------------------------------------------------- back

    def begin_backward(self) -> None:
        """The first tensor of the period is asked for."""
        if self.recorder is not None:
            self.recorder.turn()
            grown = self.engine.compute.allocated() - self._allocated_before
            self.unmanaged = max(self.unmanaged, grown - self.engine.resident)
        self.engine.begin_backward()

    def give_back(self, moved: Moved) -> Tensor:
        """The tensor that was taken, bit for bit, in HBM.

        Raises
        ------
        StoreError
            If the disk does not give back what was written.
        """
        saved, engine = moved.saved, self.engine
        with engine.lock:
            engine.collect()
            buffer = engine.source(saved)
            if not moved.was_used:
                moved.was_used = True
                engine.used(saved.group)
            # Not the alias itself, which is emptied when its group is let go, but one more: it shares the
            # program's version counter, so that what backward changes in place is noticed, too.
            tensor = moved.alias.detach()
            engine.prefetch()
        if buffer is not None:
            first = (saved.offset + moved.offset) // moved.dtype.itemsize
            view = torch.empty(0, dtype=moved.dtype, device=buffer.device)
            tensor.data = view.set_(buffer.untyped_storage(), first, moved.size, moved.stride)
        return tensor

    # ---------------------------------------------------------------------------------- periods

    def end_period(self, *, whole: bool) -> bool:
        """The period is over; whether there are new plans.

        Parameters
        ----------
        whole : bool
            See `Learner.period_over`.

        Raises
        ------
        TierFull
            If a plan moves more than the tiers below HBM hold.
        """
        with self.engine.lock:
            peak = self.engine.end_period()
            drifted = self._unforeseen or self._incomplete()
            self._begin()
            trace = None if self.recorder is None else self.recorder.trace()
            pressed = self.engine.compute.pressed()
            changed = self.learner.period_over(trace, peak, whole=whole, drifted=drifted, pressed=pressed)
            self.recorder = Recorder(self._outlived) if self.learner.records_next else None
            if self.recorder is not None:
                self._allocated_before = self.engine.compute.allocated()
            if changed:
                self._adopt(self.learner.plans)
        return changed

    def heed(self, ahead: int | None, links: Links) -> bool:
        """Bring groups back so many ahead of their use, and plan with `links`; whether there are new plans."""
        self.engine.ahead = EVERY if ahead is None else ahead
        changed = self.learner.relink(links)
        if changed:
            with self.engine.lock:
                self._adopt(self.learner.plans)
        return changed

    def forward_is_dead(self) -> bool:
        """Whether tensors were taken in this period and none of them is part of a graph any more."""
        with self.engine.lock:
            self.engine.collect()
            return self._taken > 0 and self.engine.alive == 0

    def begin_again(self) -> None:
        """Nothing of what was saved in this period is of any use: its graphs are gone. Start over."""
        with self.engine.lock:
            self._begin()
            if self.recorder is not None:
                self.recorder = Recorder(self._outlived)

    def _begin(self) -> None:
        self._open.clear()
        self._loose.clear()
        self._opened.clear()
        self._completed.clear()
        self._unforeseen = False
        self._taken = 0
        self.storages = Storages()

    def _incomplete(self) -> bool:
        """Whether sites that were foreseen did not come; of kinds of periods that alternate, one plan must fit."""
        lacking = self._opened - self._completed
        touched = [plan for plan in self.learner.plans if not self._opened.isdisjoint(plan.groups)]
        return bool(lacking) and all(not lacking.isdisjoint(plan.groups) for plan in touched)

    def _adopt(self, plans: tuple[Plan, ...]) -> None:
        try:
            self.engine.backing.check(max(plan.parcel_bytes for plan in plans))
        except TierFull:
            self.learner.forget()  # whoever catches this may go on with something smaller
            raise
        self._room = self.engine.limit = max(plan.room for plan in plans)

    def actions(self) -> Iterator[tuple[str, Stay | Go]]:
        """What the plans say of every site. A site that comes twice goes: that always fits."""
        for plan in self.learner.plans:
            for key, keep in plan.keep.items():
                yield key, Stay(self, keep.enter, keep.leave)
        for plan in self.learner.plans:
            for group in plan.groups:
                for key in group.sites:
                    yield key, Go(self, group)


def _planned_group(planned: PageGroup, stream: Stream) -> Group:
    return Group(NEVER if planned.first_use is None else planned.first_use, stream)


def _flat(storage: torch.UntypedStorage, low: int, high: int) -> Tensor:
    """The bytes ``[low, high)`` of a storage as a flat uint8 tensor."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, low, (high - low,), (1,))
