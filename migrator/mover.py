"""One device's share of a thread's program: gathers what a period saves into groups, and gives it back.

Stands between the hooks, which see one tensor at a time, and the engine, which sees groups.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from allocator.errors import TierFull
from migrator.actions import Action, Go, Pace, Recompute, Stay
from migrator.engine import EVERY, Engine
from migrator.group import NEVER, Group, State
from migrator.lanes import Stream
from migrator.learner import Learner
from migrator.links import Links
from migrator.plan import PageGroup, Plan, checkpoint_key, group_bytes, learning_room
from migrator.recompute.dropped import Dropped, Recomputed
from migrator.recompute.finder import Finder, Verified, base_of
from migrator.recompute.origins import Origins
from migrator.recorder import Recorder
from migrator.tensors import Moved
from migrator.trace import Trace

log = logging.getLogger("tiers")

UNFORESEEN = 1 << 60
"""Groups that no plan orders are expected back last in, first out, and after all that a plan orders."""


@dataclass(slots=True)
class _Open:
    """A planned group that is filling in this period."""

    planned: PageGroup
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
    keeps : bool
        The policy moves nothing, so nothing is to leave HBM before there is a plan either.
    """

    def __init__(self, engine: Engine, learner: Learner, budget: int, *, keeps: bool = False) -> None:
        self.engine = engine
        self.learner = learner
        self.budget = budget
        self.unmanaged = 0  # bytes that backward needs and no hook was told of
        self.storages = engine.tensors.Storages()
        self._outlived: set[str] = set()
        self.verified: dict[str, Verified] = {}  # by site: what held when it was tried
        self.recorder: Recorder | None = self._new_recorder()
        self._keeps = keeps
        self._room = budget if keeps else learning_room(budget)
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

    def _new_recorder(self) -> Recorder:
        self.engine.used_up = 0
        return Recorder(self._outlived, self.engine.compute.meter(), self._resident, self.verified)

    def _resident(self) -> int:
        engine = self.engine
        with engine.lock:
            engine.collect()
            nbytes, engine.used_up = engine.resident + engine.used_up, 0
            return nbytes

    # -------------------------------------------------------------------------------------- out

    def take(self, tensor: Tensor, key: str, go: Go | None, kind: str = "") -> Moved:
        """Take charge of a saved tensor.

        Raises
        ------
        TierFull
            If the plan has it leave HBM and no tier has room.
        """
        engine = self.engine
        with engine.lock:
            known = self.storages.find(tensor)
            recorder = self.recorder
            record = None if recorder is None else recorder.save(key, known, kind)
            # A group takes members of one stream only: its copy waits for that one, and that one lets go of
            # their memory.
            stream = engine.compute.stream()
            filling = self._filling(go.group, stream) if go is not None else None
            if filling is None and recorder is None:
                self._unforeseen = True
            saved = known.saved
            if saved is None or saved.group.state is State.GONE:
                # While the plan does not hold (groups wait for sites that do not come, and the limit is reached)
                # what comes travels with the unforeseen, in groups that leave as soon as they are worth a transfer.
                group = self._loose_group(stream) if filling is None or engine.over_limit() else filling.group
                saved = known.saved = engine.add(group, tensor, known.low, known.high - known.low)
                self._taken += 1
            moved = engine.tensors.Moved(tensor, self, saved, engine.hold(saved), go, record)
            if filling is not None:
                filling.missing -= 1
                if not filling.missing:
                    self._complete(filling.planned)
            if self._loose and not self._keeps:
                self._send_loose(stream)
        return moved

    def _loose_group(self, stream: Stream) -> Group:
        """The group for what no plan has foreseen."""
        group = self._loose.get(stream)
        if group is None or group.state is State.GONE:
            self._loose_made += 1
            group = self._loose[stream] = Group(UNFORESEEN - self._loose_made, stream)
        return group

    def _filling(self, planned: PageGroup, stream: Stream) -> _Open:
        """What is open for a planned group; opened if it is not, or if all that was in it died too early."""
        filling = self._open.get((planned, stream))
        if filling is None:
            self._opened.add(planned)
            filling = _Open(planned, _planned_group(planned, stream), len(planned.sites))
            self._open[planned, stream] = filling
        elif filling.group.state is State.GONE:
            filling.group = _planned_group(planned, stream)
        return filling

    def _complete(self, planned: PageGroup) -> None:
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
                log.warning("%s; tensors that no plan covers stay in hbm", str(full))

    # ------------------------------------------------------------------------------------- back

    def begin_backward(self) -> None:
        """The first tensor of the period is asked for."""
        if self.recorder is not None:
            self.recorder.turn()
            grown = self.engine.compute.allocated() - self._allocated_before
            self.unmanaged = max(self.unmanaged, grown - self.engine.resident)
        self.engine.begin_backward()

    def drop(
        self,
        tensor: Tensor,
        key: str,
        make: Recompute,
        origins: Callable[[float | None], Origins],
        kind: str,
    ) -> Dropped | Moved:
        """Let go of a saved tensor that its formula recomputes; where that does not hold any more, take it."""
        with self.engine.lock:
            known = self.storages.find(tensor)
            made = None if known.made is None else known.made()
            if made is None:
                base = base_of(tensor)
                what = make.finder.find(base, origins(make.verified.epsilon))
                if what is None:
                    return self.take(tensor, key, None, kind)
                made = Recomputed(base, what, self.engine)
                known.made = weakref.ref(made)
            record = None if self.recorder is None else self.recorder.save(key, known, kind)
            return Dropped(tensor, made, make, record)

    def give_back(self, moved: Moved, *, count: bool = True) -> Tensor:
        """The tensor that was taken, bit for bit, in HBM; with `count` backward has asked for it.

        Raises
        ------
        StoreError
            If the disk does not give back what was written.
        """
        saved, engine = moved.saved, self.engine
        with engine.lock:
            if engine.dead:
                engine.collect()
            tensor = moved.view(engine.source(saved))
            if count and not moved.was_used:
                moved.was_used = True
                engine.used(saved.group)
            if engine.unsettled:
                engine.prefetch()
        return tensor

    # ---------------------------------------------------------------------------------- periods

    def end_period(self, *, whole: bool, alone: bool = True, overflow: int = 0) -> bool:
        """The period is over; whether there are new plans.

        Parameters
        ----------
        whole : bool
            See `Learner.period_over`.
        alone : bool
            Whether no other thread trains on this device, so that periods do not overlap.
        overflow : int
            Bytes for which the allocator had no room in HBM.

        Raises
        ------
        TierFull
            If a plan moves more than the tiers below HBM hold.
        """
        with self.engine.lock:
            trace = None
            if self.recorder is not None:
                trace = self.recorder.trace()
                for key, verified in self.recorder.verified.items():
                    self.verified[key] = verified.besides(self.verified.get(key))
            peak = self.engine.end_period()
            drifted = self._unforeseen or self._incomplete()
            self._begin()
            pressed = self.engine.compute.pressed()
            # Groups that are held back on purpose are late on purpose.
            lap = self.engine.lap if alone and self.engine.ahead == EVERY else None
            changed = self.learner.period_over(
                trace, peak, whole=whole, drifted=drifted, pressed=pressed, overflow=overflow, lap=lap
            )
            self.recorder = self._new_recorder() if self.learner.records_next else None
            if changed:
                self._adopt(self.learner.plans)
            if self.recorder is not None:
                self._allocated_before = self.engine.compute.allocated()
            self.engine.limit = self._limit()
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
                self.recorder = self._new_recorder()

    def _begin(self) -> None:
        self._open.clear()
        self._loose.clear()
        self._opened.clear()
        self._completed.clear()
        self._unforeseen = False
        self._taken = 0
        self.storages = self.engine.tensors.Storages()
        self.engine.position = -1
        self.engine.limit = self._limit()

    def _limit(self) -> int:
        """Bytes that may lie in HBM when a period begins: what regions recompute moves while it is recorded."""
        if self.recorder is not None and any(plan.regions for plan in self.learner.plans):
            return min(self._room, learning_room(self.budget))
        return self._room

    def _incomplete(self) -> bool:
        """Whether sites that were foreseen did not come; of kinds of periods that alternate, one plan must fit."""
        lacking = self._opened - self._completed
        touched = [plan for plan in self.learner.plans if not self._opened.isdisjoint(plan.groups)]
        return bool(lacking) and all(not lacking.isdisjoint(plan.groups) for plan in touched)

    def _adopt(self, plans: tuple[Plan, ...]) -> None:
        try:
            needed = max(plan.parcel_bytes for plan in plans)
            self.engine.backing.check(needed)
            self.engine.backing.reserve(self, needed)
        except TierFull:
            self.learner.forget()  # whoever catches this may go on with something smaller
            raise
        self._room = max(plan.room for plan in plans)
        self.engine.limit = self._limit()

    def actions(self) -> Iterator[tuple[str, Action]]:
        """What the plans say of every site. A site that comes twice goes: that always fits."""
        paced = [
            (plan, _paces(plan, trace)) for plan, trace in zip(self.learner.plans, self.learner.traces, strict=True)
        ]
        for plan, paces in paced:
            for key, keep in plan.keep.items():
                yield key, Stay(self, keep.enter, keep.leave, paces.get(key))
        for plan, paces in paced:
            for key in plan.recompute:
                if key in self.verified:
                    yield key, Recompute(self, self.verified[key], Finder(self.verified[key]), paces.get(key))
        for plan, paces in paced:
            for group in plan.groups:
                for key in group.sites:
                    yield key, Go(self, group, paces.get(key))


def _planned_group(planned: PageGroup, stream: Stream) -> Group:
    next_use = NEVER if planned.first_use is None else planned.first_use
    bring_at = -1 if planned.bring_at is None else planned.bring_at
    return Group(next_use, stream, bring_at=bring_at, tier=planned.tier)


def _paces(plan: Plan, trace: Trace) -> dict[str, Pace]:
    """By site, when it comes and what room there is from then on; empty if the plan's room never changes."""
    if not plan.limits and all(group.bring_at is None for group in plan.groups):
        return {}
    times = {site.key: (site.birth, min(site.uses, default=-1)) for site in trace.sites}
    for region in trace.regions:
        inner = [use for site in trace.sites_of(region) for use in site.uses]
        for number in range(len(region.inputs)):
            times[checkpoint_key(region.path, number)] = (region.begin, min(inner, default=-1))
    paces = {}
    for key, (birth, use) in times.items():
        from_birth, from_use = plan.limits.get(key, (None, None))
        paces[key] = Pace(birth, use, from_birth, from_use)
    return paces
