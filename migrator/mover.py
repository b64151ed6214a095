"""One device's share of a thread's program: gathers what a period saves into groups, and gives it back.

Stands between the hooks, which see one tensor at a time, and the engine, which sees groups.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from allocator.errors import TierFull
from migrator.engine import Engine, Group, State
from migrator.hooks import Moved
from migrator.learner import Learner
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
    stays: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class Go:
    """The plan's word for a site: go, with this group."""

    mover: Mover
    group: PageGroup
    stays: ClassVar[bool] = False


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
    capacity : int
        Bytes below HBM, all tiers together.
    """

    def __init__(self, engine: Engine, learner: Learner, budget: int, capacity: int) -> None:
        self.engine = engine
        self.learner = learner
        self.budget = budget
        self.unmanaged = 0  # bytes that backward needs and no hook was told of
        self.storages = Storages()
        self._outlived: set[str] = set()
        self.recorder: Recorder | None = Recorder(self._outlived)
        self._capacity = capacity
        self._room = learning_room(budget)
        self._open: dict[PageGroup, _Open] = {}
        self._loose: Group | None = None
        self._loose_made = 0
        self._unforeseen = False
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
            if known.saved is None or known.saved.group.state is State.GONE:
                known.saved = self.engine.add(self._group(go), _flat(storage, known.low, known.high))
            saved, alias = known.saved, tensor.detach()
            self.engine.hold(saved, alias)
            first_byte = tensor.storage_offset() * tensor.itemsize - known.low
            moved = Moved(tensor, alias, self, saved, first_byte, record)
            if go is None:
                self._send_loose()
            else:
                self._arrived(go.group)
        return moved

    def _group(self, go: Go | None) -> Group:
        if go is not None:
            return self._opened(go.group).group
        if self._loose is None:
            self._loose_made += 1
            self._loose = Group(UNFORESEEN - self._loose_made)
        return self._loose

    def _opened(self, planned: PageGroup) -> _Open:
        filling = self._open.get(planned)
        if filling is None:
            filling = self._open[planned] = _Open(Group(planned.first_use), len(planned.sites))
        return filling

    def _arrived(self, planned: PageGroup) -> None:
        filling = self._opened(planned)
        filling.missing -= 1
        if filling.missing:
            return
        # Groups that should have been complete by now are waiting for a branch that was not taken.
        for late in [other for other in self._open if other.last_birth <= planned.last_birth]:
            self.engine.send(self._open.pop(late).group)

    def _send_loose(self) -> None:
        if self._loose is None or self._loose.nbytes < group_bytes(self._room):
            return
        group, self._loose = self._loose, None
        try:
            self.engine.send(group)
        except TierFull as full:
            # No plan asked for this one to go, so it may stay: the program may well fit.
            if not self._full_said:
                self._full_said = True
                log.warning("%s; what no plan has foreseen stays in hbm", full)

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
            engine.prefetch()
        if buffer is None:
            return moved.alias.detach()  # not the alias itself, which is emptied when its group is let go
        view = torch.empty(0, dtype=moved.dtype, device=buffer.device)
        first = (saved.offset + moved.offset) // moved.dtype.itemsize
        return view.set_(buffer.untyped_storage(), first, moved.size, moved.stride)

    def left(self, nbytes: int) -> None:
        """Bytes that had stayed were used for the last time."""
        with self.engine.lock:
            self.engine.stay(-nbytes)
            self.engine.prefetch()

    # ---------------------------------------------------------------------------------- periods

    def end_period(self, peak: int, *, whole: bool) -> bool:
        """The period is over; whether there are new plans.

        Parameters
        ----------
        peak : int
            Highest use of the device's memory so far, in bytes.
        whole : bool
            See `Learner.period_over`.

        Raises
        ------
        TierFull
            If a plan moves more than the tiers below HBM hold.
        """
        with self.engine.lock:
            self.engine.collect()
            self.engine.compute.settle()
            self._open.clear()
            self._loose = None
            self.storages = Storages()
            trace = None if self.recorder is None else self.recorder.trace()
            changed = self.learner.period_over(trace, peak, whole=whole, unforeseen=self._unforeseen)
            self._unforeseen = False
            self.recorder = Recorder(self._outlived) if self.learner.records_next else None
            self.engine.recount()
            if self.recorder is not None:
                self._allocated_before = self.engine.compute.allocated()
            if changed:
                self._adopt(self.learner.plans)
        return changed

    def _adopt(self, plans: tuple[Plan, ...]) -> None:
        moved = max(plan.moved_bytes for plan in plans)
        if moved > self._capacity:
            raise TierFull("dram + nvme", None, moved, 0, self._capacity)
        self._room = self.engine.limit = max(plan.room for plan in plans)

    def actions(self) -> dict[str, list[Stay | Go | None]]:
        """What the plans say of every site, by the module's path and the site's number."""
        words: dict[str, dict[int, Stay | Go]] = {}
        for plan in self.learner.plans:
            for key, keep in plan.keep.items():
                _enter(words, key, Stay(self, keep.enter, keep.leave))
        # A site that one kind of period keeps and another moves, moves: that always fits.
        for plan in self.learner.plans:
            for group in plan.groups:
                for key in group.sites:
                    _enter(words, key, Go(self, group))
        return {path: [of.get(n) for n in range(max(of) + 1)] for path, of in words.items()}


def _enter(words: dict[str, dict[int, Stay | Go]], key: str, word: Stay | Go) -> None:
    path, _, number = key.rpartition(":")
    words.setdefault(path, {})[int(number)] = word


def _flat(storage: torch.UntypedStorage, low: int, high: int) -> Tensor:
    """The bytes ``[low, high)`` of a storage as a flat uint8 tensor."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, low, (high - low,), (1,))



