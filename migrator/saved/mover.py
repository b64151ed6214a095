"""Executes the plans of one device for one thread: collects saved tensors into groups, and restores them for backward.

The mover stands between the hooks, which see single tensors, and the engine, which offloads and prefetches groups.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from torch_tiers.allocator.errors import TierFull
from torch_tiers.migrator.controller.kinds import is_of_another_size, is_of_no_kind
from torch_tiers.migrator.controller.learner import Learner
from torch_tiers.migrator.model.links import BOUNDLESS, Links, usable
from torch_tiers.migrator.model.plan import Plan
from torch_tiers.migrator.model.timing import HostTime
from torch_tiers.migrator.model.trace import Trace
from torch_tiers.migrator.offload.engine import EVERY, Engine
from torch_tiers.migrator.offload.filling import Filling
from torch_tiers.migrator.offload.group import Saved, State
from torch_tiers.migrator.planner.sizes import has_room_to_learn, learning_room, unseen
from torch_tiers.migrator.recompute.verified import Verified, base_of
from torch_tiers.migrator.recording.recorder import Recorder
from torch_tiers.migrator.saved.actions import Action, Find, Go, Moved, Recompute
from torch_tiers.migrator.saved.agenda import actions_of
from torch_tiers.migrator.saved.dropped import Dropped, Recomputed
from torch_tiers.migrator.saved.packed import Look
from torch_tiers.migrator.saved.spot_checks import Checks
from torch_tiers.migrator.saved.tensors import HookTensors
from torch_tiers.migrator.streams import Stream

CLOSELY = 16  # iterations under new plans in which waits are timed, or until these settle: that corrects the plans
SAMPLED = 7
"""Iterations, after those, of which one is: with 2, 4 or 8 micro-batches another one each time."""


class _Whole(NamedTuple):
    """A dropped storage at one version of its tensor, and its recomputation."""

    base: weakref.ref[Tensor]
    version: int
    made: weakref.ref[Recomputed]


class Mover:
    """Executes the plans for the saved tensors of one thread on one device.

    Parameters
    ----------
    engine : Engine
        Offloads and prefetches groups.
    learner : Learner
        Decides which iterations are recorded, and orders plans.
    budget : int
        HBM budget, in bytes.
    tensors : HookTensors
        The C++ part of the hooks.
    keeps : bool
        Whether the policy keeps every tensor. Then nothing is offloaded or tried before there is a plan, either.
    spills : bool
        Whether the allocator continues in DRAM if HBM is full, so that the program survives what no plan expects.
    lent : int
        Bytes of HBM beyond the budget that the program may use before there is a plan.
    """

    def __init__(
        self,
        engine: Engine,
        learner: Learner,
        budget: int,
        tensors: HookTensors,
        *,
        keeps: bool = False,
        spills: bool = False,
        lent: int = 0,
    ) -> None:
        self.engine = engine
        self.learner = learner
        self.budget = budget
        self.unmanaged = 0  # bytes that backward needs and no hook was told of
        self._tensors = tensors
        self.storages = tensors.Storages()
        self._outlived: set[str] = set()
        self.verified: dict[str, Verified] = {}  # by site: what held when it was tried
        self.checks = Checks(engine.compute, budget)
        self._keeps = keeps
        self._spills = spills
        self.recorder: Recorder | None = self._new_recorder()
        # The program may fit without a plan. To find that it does not does no harm where the allocator goes on in DRAM.
        patient = spills and not keeps and (lent > 0 or has_room_to_learn(engine.backing.dram_capacity, budget))
        beside = unseen(budget, engine.compute.allocated()) if patient else None
        self._lent = lent if patient else 0
        self.filling = Filling(engine, budget if keeps else learning_room(budget + self._lent, beside))
        self.filling.patient = patient
        self._measures_room = patient  # what lies beside saved tensors tells how many of these may stay
        self._stayed = True  # since there were news everything stayed, and nothing was recomputed
        self._news = False  # for the allocator: the program is to ask for other memory than it did
        self._below = BOUNDLESS  # bytes that the tiers below HBM hold, if that was less than plans took it to be
        self._taken = 0  # storages, in this iteration
        self._dropped: dict[int, _Whole] = {}  # what was dropped last of each storage
        self._held_back: set[Stream] = set()  # whose unforeseen groups wait for the next storage
        self._unchanged = 0  # iterations under the plans that there are
        self._fitting = 0  # iterations, one after the other, that HBM had room for
        self._allocated_before = engine.compute.allocated()
        engine.limit = self.filling.room

    def pays_back(self) -> bool:
        """Return whether the loan beyond the budget has become unnecessary since the last call."""
        if self.filling.patient or not self._lent:
            return False
        self._lent = 0
        return True

    @property
    def idle(self) -> bool:
        """Return whether the hooks have nothing to do with saved tensors: ever, or until HBM is full."""
        if self.recorder is not None or not self.learner.complete:
            return False
        if self._keeps:
            return True
        # Not before it was seen that the program fits: what HBM has no room for corrects the plans.
        fits = self._spills and self.learner.settled and min(self._unchanged, self._fitting) > CLOSELY
        return fits and all(plan.keeps_everything for plan in self.learner.plans)

    def wake(self) -> bool:
        """Start to record again, as HBM is full; return False if the policy keeps everything anyway."""
        if self._keeps:
            return False
        with self.engine.lock:
            self._fitting = 0
            self._measures_room = False
            self.learner.forget()
            self.recorder = self._new_recorder()
            self._expect_too_much()
            self._begin()
            self._allocated_before = self.engine.compute.allocated()
        return True

    def _new_recorder(self, *, held: bool = True) -> Recorder:
        self.engine.used_up = 0
        meter = self.engine.meter = self.engine.compute.meter(held=held)
        return Recorder(
            self._outlived, meter, self._resident, self.verified, self.checks.differing, tries=not self._keeps
        )

    def _resident(self) -> int:
        engine = self.engine
        with engine.lock:
            engine.collect()
            nbytes, engine.used_up = engine.resident + engine.used_up, 0
            return nbytes

    # -------------------------------------------------------------------------------------- out

    def take(self, tensor: Tensor, key: str, go: Go | None, kind: str = "") -> Moved:
        """Put a saved tensor into a group.

        A group that the plan offloads stays in HBM if no tier has room for it.
        """
        engine = self.engine
        with engine.lock:
            if self.filling.waits:
                self.filling.offload_waiting()
            known = self.storages.find(tensor)
            recorder = self.recorder
            record = None if recorder is None else recorder.save(key, known, kind)
            # A group takes members of one stream only: its copy waits for that one, and that one releases
            # their memory.
            stream = engine.compute.stream()
            filling = None if go is None else self.filling.planned(go.group, stream)
            saved, fresh = known.saved, 0
            if saved is None or saved.group.state is State.GONE or _is_another_stream_s(saved, tensor, stream):
                for waiting in tuple(self._held_back):
                    self._offload_unforeseen(waiting)
                # While the plan does not hold (groups wait for sites that do not come, and the limit is reached) new
                # tensors join the groups of what no plan knows, which leave once they are large enough to transfer.
                group = self.filling.loose_group(stream) if filling is None or engine.over_limit() else filling.group
                saved = known.saved = engine.add(group, tensor, known.low, known.high - known.low)
                self._taken += 1
                fresh = saved.nbytes
                if not tensor.requires_grad:  # and so has no `grad_fn`, to ask for which makes an object
                    self.filling.may_be_unfilled(group)
            if filling is None and recorder is None:
                tensors, nbytes = self.filling.unforeseen
                self.filling.unforeseen = tensors + 1, nbytes + fresh
            moved = self._tensors.Moved(tensor, self, saved, engine.hold(saved), go, record)
            if filling is not None:
                self.filling.came(filling, fresh)
            if self.filling.loose:
                if _is_part(tensor, saved):
                    # Others may come right after, which share what has not left: it goes once another storage comes.
                    self._held_back.add(stream)
                else:
                    self._offload_unforeseen(stream)
        return moved

    def _offload_unforeseen(self, stream: Stream) -> None:
        """Offload tensors that no plan expects, unless HBM may have room for them."""
        self._held_back.discard(stream)
        if self.filling.loose and not self._keeps:
            if self.filling.patient and self.engine.resident > self.filling.room:
                self._expect_too_much()
            self.filling.offload_loose(stream)

    # ------------------------------------------------------------------------------------- back

    def pass_by(self) -> None:
        """Exclude what was in use since the last optimizer step from the peak of the iteration that begins."""
        self.engine.compute.pass_by(counts=False)
        if self.recorder is not None:
            self.recorder.resume()

    def begin_backward(self) -> None:
        """Take note that backward asks for the first tensor of the iteration, and start to prefetch."""
        if self.recorder is not None:
            self.recorder.turn()
            grown = self.engine.compute.allocated() - self._allocated_before
            self.unmanaged = max(self.unmanaged, grown - self.engine.resident)
        if self.filling.waits:
            with self.engine.lock:
                self.filling.offload_waiting(over=True)
        self.engine.begin_backward()

    def drop(self, tensor: Tensor, make: Recompute, find: Find, kind: str) -> Dropped | Moved:
        """Drop a saved tensor that is recomputed later; put it into a group if the recomputation no longer holds."""
        if make.key in self.checks.differing:
            return self.take(tensor, make.key, None, kind)
        fresh = None
        with self.engine.lock:
            known = self.storages.find(tensor)
            base = base_of(tensor)
            made = None if known.made is None else known.made()
            if made is None:  # its neighbour may be dropped: parts of a fused projection are made at once
                before = self._dropped.get(known.cdata)
                if before is not None and before.base() is base and before.version == base._version:
                    made = before.made()
            if made is None:
                # What was seen since may be other than what the plan was made with, and the plan the same.
                found = find(self.verified.get(make.key, make.verified), base)
                if found is None:
                    return self.take(tensor, make.key, None, kind)
                made = fresh = Recomputed(base, *found, self.engine)
                self._dropped[known.cdata] = _Whole(weakref.ref(base), base._version, weakref.ref(made))
            known.made = weakref.ref(made)
            record = None if self.recorder is None else self.recorder.save(make.key, known, kind)
            dropped = Dropped(tensor, made, make, record)
        if fresh is not None and self.checks.on and not self.engine.compute.capturing():
            self.checks.look(make.key, base, fresh, Look)
            if make.key in self.checks.differing:
                return self.take(tensor, make.key, None, kind)
        return dropped

    def restore(self, moved: Moved, *, count: bool = True) -> Tensor:
        """Return the tensor that was taken, bit for bit, in HBM.

        Parameters
        ----------
        count : bool
            Whether this is a use by backward.

        Raises
        ------
        StoreError
            If the disk does not return what was written.
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

    def glimpse(self, moved: Moved) -> Tensor:
        """Return the same tensor without bringing its group back for good; see `Engine.glimpse`."""
        with self.engine.lock:
            return moved.view(self.engine.glimpse(moved.saved))

    # ---------------------------------------------------------------------------------- iterations

    def end_iteration(
        self, *, whole: bool, alone: bool = True, overflow: int = 0, host: HostTime | None = None
    ) -> bool:
        """End the iteration; return whether there are new plans.

        Parameters
        ----------
        whole : bool
            See `Learner.iteration_over`.
        alone : bool
            Whether no other thread trains on this device, so that iterations do not overlap.
        overflow : int
            Bytes for which the allocator had no room in HBM.
        host : HostTime, optional
            See `Learner.iteration_over`.
        """
        self._fitting = 0 if overflow else self._fitting + 1
        self._stayed &= not self.filling.offloaded and all(plan.keeps_everything for plan in self.learner.plans)
        with self.engine.lock:
            trace = None
            if self.recorder is not None:
                trace = self.recorder.trace()  # which waits for the device
                if not self.engine.compute.capturing():
                    self.engine.compute.tidy()
                for key, verified in self.recorder.verified.items():
                    self.verified[key] = verified.besides(self.verified.get(key))
                self._see_beside(trace)
            peak = self.engine.end_iteration()
            granted, refused = self.filling.granted, self.filling.refused
            lacking = self.filling.lacking(self.learner.plans)
            mispredicted = is_of_no_kind(self.learner.traces, self.filling.unforeseen, lacking)
            resized = is_of_another_size(*self.filling.complete)
            self._begin()
            pressed = self.engine.compute.pressed()
            # Groups that are held back on purpose are late on purpose.
            iteration_time = self.engine.iteration_time if alone and self.engine.ahead == EVERY else None
            changed = self.learner.iteration_over(
                trace,
                peak,
                whole=whole,
                mispredicted=mispredicted,
                resized=resized,
                pressed=pressed,
                overflow=overflow,
                iteration_time=iteration_time,
                host=None if iteration_time is None else host,
                refused=refused,
                static=self.engine.compute.allocated,
            )
            if refused and trace is None and not (changed or mispredicted):  # else it may not have been these plans'
                changed = self._plans_for_less(granted)
            if self.checks.iteration_over():
                self.verified = {key: held for key, held in self.verified.items() if key not in self.checks.differing}
                self.learner.forget()
            self.recorder = self.engine.meter = None
            if overflow and self._measures_room and not self.learner.plans:  # there was less room than was seen
                self._measures_room = False
                self._expect_too_much()
            if self.learner.records_next:
                self.recorder = self._new_recorder()
            if changed:
                self._adopt()
            if self.recorder is not None:
                self._allocated_before = self.engine.compute.allocated()
            self.engine.limit = self._limit()
            self.engine.compute.time_waits(stands_for := self._to_stand_for())
            self.checks.on = self.recorder is None and not stands_for
        return changed

    def _see_beside(self, trace: Trace) -> None:
        """Reduce the room by what lay in HBM besides saved tensors, and by what lives on: the optimizer's state."""
        if self._measures_room and trace.others and not self.learner.plans:
            lives_on = self.engine.compute.allocated() - self._allocated_before
            lent = self._lent if self.filling.patient else 0  # else it is about to be paid back
            self.filling.room = learning_room(self.budget + lent, max(trace.others) + max(0, lives_on))

    def _expect_too_much(self) -> None:
        """Offload all tensors that no plan expects: the program does not fit without a plan."""
        self._news |= self.filling.patient  # what stayed so far needs no memory from now on
        self.filling.patient = False
        self.filling.room = learning_room(self.budget)
        self.engine.limit = self._limit()

    def take_news(self) -> bool:
        """Return whether the program's requests for memory have changed since the last call.

        The allocator then makes a new layout, which costs some steps of a second.
        """
        news, self._news = self._news, False
        self._stayed |= news
        return news

    def _to_stand_for(self) -> int:
        """Return for how many iterations the waits of the next one stand; 0 if they are not timed."""
        self._unchanged += 1
        if self.recorder is not None or self._unchanged <= CLOSELY or not self.learner.settled:
            return 1
        return 0 if self._unchanged % SAMPLED else SAMPLED

    def apply_advice(self, ahead: int | None, links: Links) -> bool:
        """Apply the monitor's advice; return whether there are new plans.

        Parameters
        ----------
        ahead : int or None
            Groups that may be prefetched before backward asks for the first of them; None: as many as there is room
            for.
        links : Links
            Bandwidths for the planner.
        """
        before, self.engine.ahead = self.engine.ahead, EVERY if ahead is None else ahead
        if self.engine.ahead != before:
            self.learner.rearranged()
        less = replace(links, below=min(links.below, self._below), dram=min(links.dram, self._below))
        changed = self.learner.relink(less)
        if changed:
            with self.engine.lock:
                self._adopt()
        return changed

    def collect(self) -> None:
        """Free the memory of tensors that no graph holds any more."""
        if self.engine.dead and not self.engine.compute.capturing():
            with self.engine.lock:
                self.engine.collect()

    def forward_is_dead(self) -> bool:
        """Return whether this iteration saved tensors of which no graph holds any."""
        with self.engine.lock:
            self.engine.collect()
            return self._taken > 0 and self.engine.alive == 0

    def begin_again(self) -> None:
        """Restart the iteration: no graph holds what it has saved."""
        with self.engine.lock:
            self._begin()
            if self.recorder is not None:  # without a head start: to begin again may be the program's habit
                self.recorder.abandon()  # whose meter has the clock of operators
                self.recorder = self._new_recorder(held=False)

    def record_no_more(self) -> None:
        """Stop recording this iteration."""
        with self.engine.lock:
            if self.recorder is not None:
                self.recorder.abandon()
            self.recorder = self.engine.meter = None
            if not self.engine.compute.capturing():
                self.engine.compute.tidy()

    def _begin(self) -> None:
        self.filling.begin()
        self._taken = 0
        self._dropped.clear()
        self._held_back.clear()
        self.storages = self._tensors.Storages()
        self.engine.position = -1
        self.engine.limit = self._limit()

    def _limit(self) -> int:
        """Return how many saved bytes may lie in HBM when an iteration begins."""
        if self.recorder is None and self._moves_nothing():  # what stays is not all counted: it might all be there
            return self.filling.room - max((plan.kept_bytes for plan in self.learner.plans), default=0)
        return self.filling.room

    def _moves_nothing(self) -> bool:
        """Return whether kept tensors need not be counted: no group waits for their room."""
        plans = self.learner.plans
        return self.engine.compute.counts and bool(plans) and not any(plan.groups for plan in plans)

    def _adopt(self) -> None:
        while (refusal := self._refusal(self.learner.plans)) is not None:
            # Others take their share of a node's memory, disks fill up.
            if not self._plans_for_less(usable(self.engine.backing.capacity)):
                self.engine.backing.say_what_stays(refusal)
                break
        plans = self.learner.plans
        largest = max((group.nbytes for plan in plans for group in plan.groups), default=0)
        self.engine.backing.reserve(self, max(plan.stored_bytes for plan in plans), largest)
        self.filling.patient = False
        self.filling.room = max(plan.room for plan in plans)
        self.engine.limit = self._limit()
        self._unchanged = 0
        if not self.engine.compute.capturing():
            self.engine.compute.renew()
        self._news |= not (self._stayed and all(plan.keeps_everything for plan in plans))

    def _refusal(self, plans: tuple[Plan, ...]) -> TierFull | None:
        """Return the error if the tiers below HBM cannot hold what the plans offload at once; else None."""
        try:
            self.engine.backing.check(max(plan.stored_bytes for plan in plans))
        except TierFull as refusal:
            return refusal
        return None

    def _plans_for_less(self, holds: int) -> bool:
        """Plan for `holds` bytes below HBM; return whether there are other plans."""
        if holds >= self._below:  # that is what the plans were made for already
            return False
        self._below = holds
        before = self.learner.plans
        self.learner.plan_for_less(holds)
        return self.learner.plans != before

    def actions(self) -> Iterator[tuple[str, Action]]:
        """Yield the action of every site that the plans know."""
        pairs = list(zip(self.learner.plans, self.learner.traces, strict=True))
        return actions_of(self, pairs, self.verified, nothing_moves=self._moves_nothing())


def _is_part(tensor: Tensor, saved: Saved) -> bool:
    """Return whether tensors saved right after this one may share its bytes; see `is_beside` of `native/storages.h`."""
    return tensor._base is None and tensor.grad_fn is None and tensor.nbytes < saved.nbytes


def _is_another_stream_s(saved: Saved, tensor: Tensor, stream: Stream) -> bool:
    """Return whether the tensor was written by another stream than the one that its group waits for."""
    return saved.group.stream != stream and tensor._base is None
