"""Has plans made by what the iterations of one device tell, and adopts them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from torch_tiers.allocator.errors import TierFull
from torch_tiers.allocator.overflow import Overflow
from torch_tiers.migrator.controller.kinds import is_of_another_size, is_of_no_kind
from torch_tiers.migrator.controller.learner import Learner
from torch_tiers.migrator.controller.outcome import IterationOutcome
from torch_tiers.migrator.model.links import BOUNDLESS, Links, usable
from torch_tiers.migrator.model.timing import HostTime
from torch_tiers.migrator.model.trace import Trace
from torch_tiers.migrator.offload.engine import EVERY, Engine
from torch_tiers.migrator.offload.filling import Filling
from torch_tiers.migrator.recompute.verified import Verified
from torch_tiers.migrator.saved.actions import Action, Owner
from torch_tiers.migrator.saved.agenda import actions_of
from torch_tiers.migrator.saved.learning_room import LearningRoom

CLOSELY = 16  # iterations under new plans in which waits are timed, or until these settle: that corrects the plans
SAMPLED = 7
"""Iterations, after those, of which one is: with 2, 4 or 8 micro-batches another one each time."""


class DevicePlans:
    """The plans for the saved tensors of one thread on one device. To be used with the engine's lock.

    For `learner` and `spills` see `migrator.saved.mover.Mover`.
    """

    def __init__(self, engine: Engine, filling: Filling, learner: Learner, room: LearningRoom, *, spills: bool) -> None:
        self.learner = learner
        self.room = room
        self._engine = engine
        self._filling = filling
        self._spills = spills
        self._stayed = True  # since the allocator was last told, everything stayed and nothing was recomputed
        self._news = False  # for the allocator: the program is to ask for other memory than it did
        self._below = BOUNDLESS  # bytes that the tiers below HBM hold, if that was less than plans took it to be
        self._fitting = 0  # iterations, one after the other, that HBM had room for
        self._period: int | None = None  # the allocator's last of which it was told

    @property
    def keep_everything(self) -> bool:
        """Return whether everything stays by the plans, and long enough did."""
        # Not before it was seen that the program fits: what HBM has no room for corrects the plans.
        fits = min(self.learner.iterations_in_force + 1, self._fitting) > CLOSELY
        keeps = all(plan.keeps_everything for plan in self.learner.plans)
        return self._spills and self.learner.settled and fits and keeps

    def begin_anew(self) -> None:
        """Forget the plans, as HBM is full, and begin an iteration that is recorded."""
        self._fitting = 0
        self.learner.forget()
        self.room.measures_no_more()
        self.expect_too_much()
        self.begin(recorded=True)

    def expect_too_much(self) -> None:
        """Offload all tensors that no plan expects: the program does not fit without a plan."""
        self._news |= self._filling.patient  # what stayed so far needs no memory from now on
        self.room.end()

    def take_news(self) -> bool:
        """Return whether the program's requests for memory have changed since the last call.

        The allocator then makes a new layout, which costs some steps of a second.
        """
        news, self._news = self._news, False
        self._stayed |= news
        return news

    def knows(self, overflow: Overflow) -> bool:
        """Return whether an iteration before this one has told of that period."""
        return overflow.period is not None and overflow.period == self._period

    def begin(self, *, recorded: bool) -> None:
        """Begin an iteration."""
        self._filling.begin()
        self._engine.hbm.limit = self._limit(recorded=recorded)

    def iteration_over(
        self, trace: Trace | None, peak: int, *, whole: bool, alone: bool, overflow: Overflow, host: HostTime | None
    ) -> bool:
        """Take in one iteration; return whether there are new plans, which `next_begins` is to adopt.

        For the parameters see `IterationOutcome` and `Mover.end_iteration`.
        """
        told, self._period = self.knows(overflow), overflow.period
        engine, filling, plans = self._engine, self._filling, self.learner.plans
        self._fitting = 0 if overflow.nbytes else self._fitting + 1
        self._stayed &= not filling.offloaded and all(plan.keeps_everything for plan in plans)
        granted, refused = filling.granted, filling.refused
        mispredicted = is_of_no_kind(self.learner.traces, filling.unforeseen, filling.lacking(plans))
        resized = is_of_another_size(*filling.complete)
        self.begin(recorded=trace is not None)
        pressed = engine.compute.pressed()
        # Groups that are held back on purpose are late on purpose.
        iteration_time = engine.iteration_time if alone and engine.ahead == EVERY else None
        outcome = IterationOutcome(
            trace,
            peak,
            whole=whole,
            mispredicted=mispredicted,
            resized=resized,
            pressed=pressed,
            overflow=overflow.nbytes,
            laid_out=overflow.laid_out,
            ends_period=not told,
            refused=refused,
            iteration_time=iteration_time,
            host=None if iteration_time is None else host,
            static=engine.compute.allocated,
        )
        changed = self.learner.iteration_over(outcome)
        if refused and trace is None and not (changed or mispredicted):  # else it may not have been these plans'
            return self._plans_for_less(granted)
        return changed

    def follow(self, before: Learner) -> bool:
        """Carry out plans for what another learner has recorded; see `Learner.follow`."""
        if not self.learner.follow(before):
            return False
        self.next_begins(changed=True, overflow=False, recorded=self.learner.records_next)
        return True

    def next_begins(self, *, changed: bool, overflow: bool, recorded: bool) -> int:
        """Adopt plans that changed; return for how many iterations the waits of the next one stand, 0 if not timed."""
        if overflow and not self.learner.plans and self.room.measures_no_more():
            self.expect_too_much()
        if changed:
            self.adopt()
        self._engine.hbm.limit = self._limit(recorded=recorded)
        under = self.learner.iterations_in_force + 1  # with this one
        if recorded or under <= CLOSELY or not self.learner.settled:
            stands_for = 1
        else:
            stands_for = 0 if under % SAMPLED else SAMPLED
        self._engine.compute.time_waits(stands_for)
        return stands_for

    def apply_advice(self, ahead: int | None, links: Links, *, recorded: bool) -> bool:
        """Apply the monitor's advice; return whether there are new plans. To be called without the engine's lock.

        Parameters
        ----------
        ahead : int or None
            Groups that may be prefetched before backward asks for the first of them; None: as many as there is room
            for.
        links : Links
            Bandwidths for the planner.
        recorded : bool
            Whether the iteration that begins is recorded.
        """
        before, self._engine.ahead = self._engine.ahead, EVERY if ahead is None else ahead
        if self._engine.ahead != before:
            self.learner.rearranged()
        less = replace(links, below=min(links.below, self._below), dram=min(links.dram, self._below))
        changed = self.learner.relink(less)
        if changed:
            with self._engine.lock:
                self.adopt()
                self._engine.hbm.limit = self._limit(recorded=recorded)
        return changed

    def adopt(self) -> None:
        """Carry out the learner's plans from now on, but for the limit that these begin with."""
        backing, compute = self._engine.backing, self._engine.compute
        try:
            backing.check(max(plan.stored_bytes for plan in self.learner.plans))
        except TierFull as refusal:
            # Others take their share of a node's memory, disks fill up.
            if self._plans_for_less(usable(backing.capacity)):
                return self.adopt()
            backing.say_what_stays(refusal)
        plans = self.learner.plans
        largest = max((group.nbytes for plan in plans for group in plan.groups), default=0)
        backing.reserve(self, max(plan.stored_bytes for plan in plans), largest)
        self._filling.patient = False
        self._filling.room = max(plan.room for plan in plans)
        if not compute.capturing():
            compute.renew()
        self._news |= not (self._stayed and all(plan.keeps_everything for plan in plans))

    def _plans_for_less(self, holds: int) -> bool:
        """Plan for `holds` bytes below HBM; return whether there are other plans."""
        if holds >= self._below:  # that is what the plans were made for already
            return False
        self._below = holds
        before = self.learner.plans
        self.learner.plan_for_less(holds)
        return self.learner.plans != before

    def _limit(self, *, recorded: bool) -> int:
        """Return how many saved bytes may lie in HBM when an iteration begins."""
        if not recorded and self._move_nothing():  # what stays is not all counted: it might all be there
            return self._filling.room - max((plan.kept_bytes for plan in self.learner.plans), default=0)
        return self._filling.room

    def _move_nothing(self) -> bool:
        """Return whether kept tensors need not be counted: no group waits for their room."""
        plans = self.learner.plans
        return self._engine.compute.counts and bool(plans) and not any(plan.groups for plan in plans)

    def actions(self, owner: Owner, verified: Mapping[str, Verified]) -> Iterator[tuple[str, Action]]:
        """Yield the action of every site that the plans know; for the parameters see `actions_of`."""
        pairs = list(zip(self.learner.plans, self.learner.traces, strict=True))
        return actions_of(owner, pairs, verified, nothing_moves=self._move_nothing())
