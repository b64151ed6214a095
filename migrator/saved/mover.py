"""Takes the saved tensors of one thread and device: collects them into groups or drops them, and restores them.

The mover stands between the hooks, which see single tensors, and the engine, which offloads and prefetches groups.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator

from torch import Tensor

from torch_tiers.allocator.overflow import FITS, Overflow
from torch_tiers.migrator.controller.learner import Learner
from torch_tiers.migrator.model.timing import HostTime
from torch_tiers.migrator.model.trace import Trace
from torch_tiers.migrator.offload.engine import Engine
from torch_tiers.migrator.offload.filling import Filling
from torch_tiers.migrator.offload.group import State
from torch_tiers.migrator.recompute.verified import Verified, add, base_of
from torch_tiers.migrator.recording.recorder import Recorder
from torch_tiers.migrator.saved.actions import Action, Find, Go, Moved, Recompute
from torch_tiers.migrator.saved.device_plans import DevicePlans
from torch_tiers.migrator.saved.dropped import Dropped, Recomputed
from torch_tiers.migrator.saved.learning_room import LearningRoom
from torch_tiers.migrator.saved.packed import Look
from torch_tiers.migrator.saved.parts import is_part, may_be_outdated, taken_by, was_written_on_another_stream
from torch_tiers.migrator.saved.spot_checks import Checks
from torch_tiers.migrator.saved.tensors import HookTensors
from torch_tiers.migrator.streams import Stream


class Mover:
    """Executes the plans for the saved tensors of one thread on one device, iteration by iteration.

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
        self.recorder: Recorder | None = self._new_recorder()
        self.filling = Filling(engine, budget)
        room = LearningRoom(engine, self.filling, budget, keeps=keeps, spills=spills, lent=lent)
        self.plans = DevicePlans(engine, self.filling, learner, room, spills=spills)
        self._taken = 0  # storages, in this iteration
        self.dropped: dict[int, weakref.ref[Recomputed]] = {}  # what was dropped last of each storage, by `Known.cdata`
        self._held_back: set[Stream] = set()  # whose unforeseen groups wait for the next storage
        self._allocated_before = engine.compute.allocated()
        engine.hbm.limit = self.filling.room

    @property
    def idle(self) -> bool:
        """Return whether the hooks have nothing to do with saved tensors: ever, or until HBM is full."""
        if self.recorder is not None or not self.learner.complete:
            return False
        return self._keeps or self.plans.keep_everything

    def wake(self) -> bool:
        """Start to record again, as HBM is full; return False if the policy keeps everything anyway."""
        if self._keeps:
            return False
        with self.engine.lock:
            self.plans.begin_anew()
            self.recorder = self._new_recorder()
            self._begin()
            self._allocated_before = self.engine.compute.allocated()
        return True

    def follow(self, before: Mover) -> None:
        """Plan for what a mover with another budget has recorded, with what held when it was tried. May raise."""
        with self.engine.lock:
            self.verified |= before.verified
            self.checks.refused |= before.checks.refused
            if self.plans.follow(before.learner) and not self.learner.records_next:
                self.record_no_more()

    def _new_recorder(self, *, held: bool = True) -> Recorder:
        self.engine.hbm.used_up = 0
        meter = self.engine.meter = self.engine.compute.meter(held=held)
        return Recorder(
            self._outlived, meter, self._resident, self.verified, self.checks.refused, tries=not self._keeps
        )

    def _resident(self) -> int:
        engine = self.engine
        with engine.lock:
            engine.collect()
            nbytes, engine.hbm.used_up = engine.hbm.resident + engine.hbm.used_up, 0
            return nbytes

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
            if (
                saved is None
                or saved.group.state is State.GONE
                or was_written_on_another_stream(saved, tensor, stream)
                or may_be_outdated(tensor, known, saved)
            ):
                for waiting in tuple(self._held_back):
                    self._offload_unforeseen(waiting)
                # While the plan does not hold (groups wait for sites that do not come, and the limit is reached) new
                # tensors join the groups of what no plan knows, which leave once they are large enough to transfer.
                group = self.filling.loose_group(stream) if filling is None or engine.over_limit() else filling.group
                saved = known.saved = engine.add(group, tensor, known.low, known.high - known.low)
                self._taken += 1
                fresh = saved.nbytes
                known.operation = taken_by(tensor, fresh)
                if not tensor.requires_grad:  # and so has no `grad_fn`, to ask for which makes an object
                    self.filling.may_be_unfilled(group)
            if filling is None and recorder is None:
                tensors, nbytes = self.filling.unforeseen
                self.filling.unforeseen = tensors + 1, nbytes + fresh
            moved = self._tensors.Moved(tensor, self, saved, engine.hold(saved), go, record)
            if filling is not None:
                self.filling.came(filling, fresh)
            if self.filling.loose:
                if is_part(tensor, saved):
                    # Others may come right after, which share what has not left: it goes once another storage comes.
                    self._held_back.add(stream)
                else:
                    self._offload_unforeseen(stream)
        return moved

    def _offload_unforeseen(self, stream: Stream) -> None:
        """Offload tensors that no plan expects, unless HBM may have room for them."""
        self._held_back.discard(stream)
        if self.filling.loose and not self._keeps:
            if self.filling.patient and self.engine.hbm.resident > self.filling.room:
                self.plans.expect_too_much()
            self.filling.offload_loose(stream)

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
            self.unmanaged = max(self.unmanaged, grown - self.engine.hbm.resident)
        if self.filling.waits:
            with self.engine.lock:
                self.filling.offload_waiting(over=True)
        self.engine.begin_backward()

    def drop(self, tensor: Tensor, make: Recompute, find: Find, kind: str) -> Dropped | Moved:
        """Drop a saved tensor that is recomputed later; put it into a group if the recomputation no longer holds.

        `native/drop.h` has a shortcut.
        """
        if make.key in self.checks.refused:
            return self.take(tensor, make.key, None, kind)
        fresh = None
        with self.engine.lock:
            known = self.storages.find(tensor)
            base = base_of(tensor)
            made = None if known.made is None else known.made()
            if made is None:  # its neighbour may be dropped: parts of a fused projection are made at once
                before = self.dropped.get(known.cdata)
                neighbour = None if before is None else before()
                if neighbour is not None and neighbour.is_of(base):
                    made = neighbour
            if made is None:
                # What was seen since may be other than what the plan was made with, and the plan the same.
                found = find(self.verified.get(make.key, make.verified), base)
                if found is None:
                    return self.take(tensor, make.key, None, kind)
                made = fresh = Recomputed(base, *found, self.engine)
                self.dropped[known.cdata] = weakref.ref(made)
            known.made = weakref.ref(made)
            record = None if self.recorder is None else self.recorder.save(make.key, known, kind)
            dropped = Dropped(tensor, made, make, record)
        if fresh is not None:
            self.checks.look(make.key, base, fresh, Look)
            if make.key in self.checks.refused:
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

    def end_iteration(
        self, *, whole: bool, alone: bool = True, overflow: Overflow = FITS, host: HostTime | None = None
    ) -> bool:
        """End the iteration; return whether there are new plans.

        Parameters
        ----------
        whole, host, overflow
            See `migrator.controller.outcome`.
        alone : bool
            Whether no other thread trains on this device, so that iterations do not overlap.
        """
        with self.engine.lock:
            # First, as what follows may raise: a recorder that has ended must not go on.
            recorder, self.recorder, self.engine.meter = self.recorder, None, None
            trace = None if recorder is None else self._recorded(recorder)
            peak = self.engine.end_iteration()
            self._begin()
            changed = self.plans.iteration_over(trace, peak, whole=whole, alone=alone, overflow=overflow, host=host)
            differs = self.checks.iteration_over()
            add(self.verified, self.checks.take_held(self.verified))
            if differs:
                self.verified = {key: held for key, held in self.verified.items() if key not in self.checks.refused}
                self.learner.forget()
                changed = False  # plans that are there just now were made with what differs
            elif new := self.checks.refuse_fresh():
                changed |= self.learner.do_without(new)
            if self.learner.records_next:
                self.recorder = self._new_recorder()
            records = self.recorder is not None
            waits = self.plans.next_begins(changed=changed, overflow=overflow.nbytes > 0, recorded=records)
            self.checks.on = not (records or waits)
            if records:
                self._allocated_before = self.engine.compute.allocated()
        return changed

    def _recorded(self, recorder: Recorder) -> Trace:
        trace = recorder.trace()  # which waits for the device
        if not self.engine.compute.capturing():
            self.engine.compute.tidy()
        add(self.verified, recorder.verified)
        if not self.learner.plans:
            self.plans.room.see_beside(trace, self._allocated_before)
        return trace

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
            self.plans.begin(recorded=self.recorder is not None)
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
        self._taken = 0
        self.dropped.clear()
        self._held_back.clear()
        self.storages = self._tensors.Storages()
        self.engine.hbm.position = -1

    def actions(self) -> Iterator[tuple[str, Action]]:
        """Yield the action of every site that the plans know."""
        return self.plans.actions(self, self.verified)
