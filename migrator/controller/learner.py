"""Decides when plans are made and which plans hold, for one device.

Without torch and I/O: the learner takes in traces and measurements and returns plans; the caller decides who runs its
jobs. `migrator.controller.recordings` decides which iterations are recorded.

If a trace has measured what else lies in HBM, the plan is made for the target itself. If not, the budget is the room
that the rest of the program leaves; the first estimate assumes that nothing saved was part of the first iteration's
peak. From then on `budget` corrects both.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from operator import is_

from torch_tiers.migrator.controller.background import DEADLINE, at_once
from torch_tiers.migrator.controller.budget import SETTLED, SETTLING
from torch_tiers.migrator.controller.cached_plans import CachedPlans, PlanCache
from torch_tiers.migrator.controller.feedback import Feedback
from torch_tiers.migrator.controller.plan_requests import PlanningFailed, PlanRequests, Submit
from torch_tiers.migrator.controller.planned import GAIN, PlannedIteration, after, are_the_same, predict_all
from torch_tiers.migrator.controller.recordings import Recordings
from torch_tiers.migrator.model.links import PCIE_GEN5, Links
from torch_tiers.migrator.model.plan import NoPlanFits, Plan
from torch_tiers.migrator.model.timing import HostTime, IterationTime, alike
from torch_tiers.migrator.model.trace import Trace
from torch_tiers.migrator.policies import Policy
from torch_tiers.migrator.simulator import Simulated, simulate

log = logging.getLogger("tiers")

REFUSED, FAILED = "no plan fits", "planning failed"  # what a user is warned of once
AT_THE_END = 10.0  # seconds for which a program's end waits for plans that are only to be told of
PATIENCE = 3  # iterations without an optimizer step after which the program is taken to have none


class Learner:
    """Plans the iterations of one device.

    Parameters
    ----------
    policy : Policy
        Makes the plans.
    target : int
        The peak to aim for, in bytes.
    links : Links
        Bandwidths that the policy assumes.
    submit : callable
        Runs a job that takes longer than some milliseconds. Its plans are adopted at the end of the iteration in which
        they are ready.
    recordings : int
        Iterations that are recorded before the first plan; see `migrator.model.timing`.
    must_fit : bool
        Whether a target that no plan meets is an error. If the allocator can put the excess elsewhere, the plan that
        comes closest is executed, with one warning.
    budget : int, optional
        The user's budget, of which the target is a part; errors name it. By default the target.
    plan_cache : PlanCache, optional
        Plans of earlier runs of the program.
    warned : set of str, optional
        Warnings that were given already: the threads of a device come and go, and one warning is enough.
    """

    def __init__(
        self,
        policy: Policy,
        target: int,
        links: Links = PCIE_GEN5,
        submit: Submit = at_once,
        recordings: int = 1,
        *,
        must_fit: bool = True,
        budget: int | None = None,
        plan_cache: PlanCache | None = None,
        warned: set[str] | None = None,
    ) -> None:
        self._target = target
        self._budget = target if budget is None else budget
        self._warned = set[str]() if warned is None else warned
        self._plan_cache = plan_cache
        self._is_cached = False  # whether what there is is in that cache
        self._static: Callable[[], int] = int  # bytes in use between iterations
        self._requests = PlanRequests(policy, submit, must_fit=must_fit)
        self._feedback = Feedback(target, links)
        self._recordings = Recordings(recordings)
        self._iterations = 0
        self._under = 0  # of these, under the plans that there are
        self._whole = False  # whether any iteration was
        self._from_cache = False  # whether this run began with what another learned
        self._verifies = False  # whether the next recorded iteration is to tell that this is right
        self._unseen = False  # whether it is still to be seen that some of that can be recomputed
        self._afresh = False  # whether something was recorded since: replays may hold for more than they did
        self._due = False  # whether plans are to be asked for, for what was recorded
        self._has_planned = False  # ever
        self._may_stay = False  # the present plans, where those that were asked for are no better
        self._planned: tuple[PlannedIteration, ...] = ()
        self._planned_traces: tuple[Trace, ...] = ()  # what `_planned` is for
        self._recorded: tuple[Trace, ...] = ()  # and that as it was recorded
        self._asked_for: tuple[Trace, ...] = ()  # the same of what is being made

    @property
    def records_next(self) -> bool:
        """Return whether the next iteration is recorded."""
        return self._recordings.due

    @property
    def planning(self) -> bool:
        """Return whether plans are being made in the background."""
        return self._requests.under_way

    @property
    def complete(self) -> bool:
        """Return whether there are plans for all kinds of iterations, and no others on their way."""
        return self._whole and self._has_all

    @property
    def settled(self) -> bool:
        """Return whether these plans stay, as far as is known: measured iteration times confirmed them.

        This may hold of programs that make no optimizer step, too.
        """
        return self._has_all and self._feedback.settled

    @property
    def _has_all(self) -> bool:
        return bool(self._planned) and not self._requests.asked and not self._recordings.due

    @property
    def plans(self) -> tuple[Plan, ...]:
        """Return one plan for each of `traces`."""
        return tuple(each.plan for each in self._planned)

    @property
    def predictions(self) -> tuple[Simulated | None, ...]:
        """Return the prediction for each of `plans`; None if its trace does not suffice."""
        return tuple(each.predicted for each in self._planned)

    @property
    def traces(self) -> tuple[Trace, ...]:
        """Return one trace for each kind of iteration that there are plans for, the one recorded last at the end."""
        return self._planned_traces

    @property
    def varies(self) -> bool:
        """Return whether iterations of a kind differ in size more often than not."""
        return self._recordings.varies

    def iteration_over(
        self,
        trace: Trace | None,
        peak: int,
        *,
        whole: bool,
        mispredicted: bool,
        resized: bool = False,
        pressed: bool,
        overflow: int = 0,
        iteration_time: IterationTime | None = None,
        host: HostTime | None = None,
        refused: bool = False,
        static: Callable[[], int] = int,
    ) -> bool:
        """Take in one iteration; return whether `plans` changed.

        Parameters
        ----------
        trace : Trace or None
            Its trace, if it was recorded.
        peak : int
            Highest use of HBM in the iteration, in bytes.
        whole : bool
            Whether everything that lives as long as the program existed when the iteration began: the optimizer makes
            its state in the first step, so peaks before that are too low.
        mispredicted : bool
            Whether considerably more was saved, or was not, than any plan expects.
        resized : bool
            Whether what was saved as planned was considerably larger or smaller than that.
        pressed : bool
            Whether the allocator had to flush its cache to stay within the budget.
        overflow : int
            Bytes for which HBM had no room, and which the allocator had to put elsewhere.
        iteration_time : IterationTime, optional
            What this iteration took the device, or the one before it, and how long compute waited for each lane.
        host : HostTime, optional
            What this iteration took the host.
        refused : bool
            Whether a tier had no room for what the plan offloads, so that it stayed in HBM. Then memory and time say
            nothing about the plan.
        static : callable
            Returns the bytes in use now, between two iterations; 0 if nobody counts them. A call takes 0.1 ms.

        Raises
        ------
        NoPlanFits
            If the target is too small for any plan, and there was none yet.
        """
        self._iterations += 1
        self._under += 1
        self._static = static
        if iteration_time is not None and iteration_time.age >= self._under:
            iteration_time = None  # of an iteration under other plans
        if whole and not self._whole:
            self._whole = True
            # The patience was too short: what was recorded lacks the optimizer's state. What is remembered does not.
            if self._recordings.traces and not self._from_cache:
                self._record_anew()
        had_plans = bool(self._planned)  # in the iteration that is over: without a plan nothing is foreseen
        changed = self._adopt()
        if trace is not None and not (had_plans or changed) and self._resume_from_cache(trace):
            return True
        if not (whole or self._iterations >= PATIENCE):
            return changed
        if trace is not None and trace.sites:
            return self._learn(trace, peak) or changed
        if not self._requests.asked:  # what is mispredicted while plans are made is what they are made for
            self._recordings.pass_by(self._iterations, mispredicted=(mispredicted or resized) and had_plans)
        if iteration_time is not None and self._under > SETTLING and not (refused or mispredicted or resized):
            self._feedback.note(iteration_time)  # also while plans are made, which are to be better than that
        if changed or refused or self._requests.asked or self._recordings.learning or not self._planned:
            return changed  # the measurements are those of a plan that is, or is about to be, replaced
        iteration_time = None if mispredicted else iteration_time
        base = max(map(self._feedback.budget.before_correction, self._planned_traces))
        if self._feedback.iteration_over(
            self._planned,
            base,
            peak,
            pressed=pressed,
            overflow=overflow,
            iteration_time=iteration_time,
            host=host,
            resized=resized,
        ):
            log.info("iteration %d, corrections changed: %s", self._iterations, self._feedback)
            return self._plan(present=self._planned if self._is_current else ())
        if self.settled:
            self._store()
        return False

    def _resume_from_cache(self, trace: Trace) -> bool:
        """Begin with the cached plans of an earlier run; return whether there are any."""
        found = None if self._plan_cache is None or self._has_planned else self._plan_cache.find(trace.sites)
        if found is None or not found.holds_for(self._feedback.given, self._static(), int(SETTLED * self._target)):
            return False
        self._feedback.resume(found.corrections)
        self._recordings.resume(found.traces)
        self._planned_traces, budgets = self._to_plan()
        kinds = zip(found.plans, self._planned_traces, budgets, strict=True)
        correction, links = self._feedback.budget.correction, self._feedback.links
        self._carry_out(
            tuple(
                PlannedIteration(plan, simulate(trace, links, plan), asked=max(0, budget + correction))
                for plan, trace, budget in kinds
            )
        )
        self._recorded, self._verifies = found.traces, True
        log.info("iteration %d, begins with cached plans of an earlier run", self._iterations)
        self._from_cache = self._is_cached = True
        dropped = {key for plan in found.plans for key in plan.recompute}
        self._unseen = not dropped <= _obtainable(trace)
        return True

    def _is_as_cached(self, trace: Trace, peak: int) -> bool:
        """Return whether the first whole iteration is no larger than in the earlier run, and recomputes as much."""
        known = {key for of in self._planned_traces for key in of.by_key}
        if not trace.by_key.keys() <= known:
            return True  # another kind, of which nothing was said
        dropped = {key for plan in self.plans for key in plan.recompute} & trace.by_key.keys()
        most = max((each.peak() for each in self._planned), default=0)
        return dropped <= _obtainable(trace) and peak <= max(most, self._target) + int(SETTLED * self._target)

    def _store(self) -> None:
        """Cache what was learned, once; not while others use the memory bus, who may not be there in the next run."""
        if self._plan_cache is None or self._is_cached or self._feedback.given.contended or not self._is_current:
            return
        self._is_cached = True
        if not any(each.least or each.refused for each in self._planned):  # else the next run is to warn again
            found = self._feedback.corrections, self._feedback.given, self._static()
            self._plan_cache.store(CachedPlans(self._recordings.traces, self.plans, *found))
            log.info("iteration %d, the plans proved right and are cached for the next run", self._iterations)

    @property
    def _is_current(self) -> bool:
        """Return whether the plans are for the latest traces: for newer ones no plan may have been possible."""
        traces = self._recordings.traces
        return len(traces) == len(self._recorded) and all(map(is_, traces, self._recorded))

    def _learn(self, trace: Trace, peak: int) -> bool:
        verifies, self._verifies = self._verifies, False
        if verifies and not self._is_as_cached(trace, peak):
            log.info("iteration %d, the program differs from that of the cached plans", self._iterations)
            self._record_anew()
        if self._recordings.add(trace, self._iterations):
            self._afresh = self._due = True
            self._feedback.news()
            self._feedback.budget.estimate(peak)
        if self._recordings.due or not self._due:  # to make plans and to begin with them takes longer than to look
            return verifies and self._unseen  # by now it can be recomputed
        return self._plan()

    def relink(self, links: Links) -> bool:
        """Plan with other `links` from now on, corrected as before; return whether `plans` changed.

        The present plans hold until others are ready. While others use the memory bus they stay if the new ones are no
        better. When these are gone, plans are what they would be without them.

        Raises
        ------
        NoPlanFits
            If the target is too small for any plan, and there was none yet.
        """
        if links == self._feedback.given:
            return False
        self._feedback.relink(links)
        # Where traces are missing, what is recorded now is planned with them.
        if self._recordings.learning or not (self._planned or self._requests.asked):
            return False
        return self._plan(present=self._planned if links.contended and self._is_current else ())

    def rearranged(self) -> None:
        """Take note that groups return earlier or later from now on, which changes the order of memory requests."""
        self._feedback.budget.rearranged()

    def plan_for_less(self, below: int) -> None:
        """Plan for `below` bytes below HBM, less than the plans offload, and wait for these plans.

        Raises
        ------
        NoPlanFits
            If the target is too small for any plan then, and there was none yet.
        """
        given = self._feedback.given
        self._feedback.relink(replace(given, below=below, dram=min(below, given.dram)))
        if self._recordings.learning:
            return  # what is recorded now is planned with these
        self._plan()
        waited = self._requests.asked
        if waited and not self._requests.wait(DEADLINE) and not self._requests.asked:
            self._say_failed(f"no plan could be made within {DEADLINE:g} s")
        self._adopt()

    def finish(self) -> None:
        """Wait for plans that are being made, as reports at the program's end describe them."""
        if self._requests.wait(AT_THE_END):
            self._adopt()
        if self.settled:
            self._store()

    def forget(self) -> None:
        """Begin anew, as the plans cannot be executed."""
        self._planned, self._planned_traces = (), ()
        self._record_anew()

    def _record_anew(self) -> None:
        """Forget the traces; the present plans hold until there are others."""
        self._recordings.begin_anew()
        self._from_cache = self._verifies = False
        self._requests.drop()
        self._feedback = Feedback(self._target, self._feedback.given)

    def _plan(self, present: tuple[PlannedIteration, ...] = ()) -> bool:
        """Order plans; return whether there are others already. An earlier order is cancelled.

        Plans that are `present` stay if those that were corrected since are no better.
        """
        traces, budgets = self._to_plan()
        self._may_stay, self._due = bool(present), False
        self._asked_for = self._recordings.traces
        self._requests.ask(traces, budgets, self._feedback.budget.correction, self._feedback.links, present)
        return self._adopt()

    def _to_plan(self) -> tuple[tuple[Trace, ...], tuple[int, ...]]:
        """Return the traces to plan for, and the budget of each before correction."""
        traces = tuple(self._feedback.corrected(alike(trace)) for trace in self._recordings.traces)
        return traces, tuple(map(self._feedback.budget.before_correction, traces))

    def _adopt(self) -> bool:
        """Adopt plans that are ready; return whether they differ from the present ones."""
        try:
            taken = self._requests.take()
        except NoPlanFits as error:
            if not self._has_planned:
                raise
            self._warn_once(REFUSED, f"{error.out_of(self._budget)}; the plans there are stay")
            return False
        except PlanningFailed as error:
            self._say_failed(str(error))
            return False
        if taken is None:
            return False
        planned, self._planned_traces = taken
        self._recorded = self._asked_for
        afresh, self._afresh = self._afresh, False
        if afresh:
            self._recordings.planned(self._iterations)
        planned = after(planned, self._planned, afresh=afresh)
        if self._may_stay and not afresh and self._takes_longer(planned):
            stay = (
                replace(new, plan=old.plan, asked=old.asked) for new, old in zip(planned, self._planned, strict=True)
            )
            planned = predict_all(tuple(stay), self._planned_traces, self._feedback.links)
        if not afresh and are_the_same(planned, self._planned):
            # As where nothing moves, whatever the pace. To begin with a plan anew costs steps of a second.
            self._stay(planned)
            log.info("iteration %d, the plans stay: %s", self._iterations, "; ".join(map(str, planned)))
            return False
        self._carry_out(planned)
        return True

    def _takes_longer(self, planned: tuple[PlannedIteration, ...]) -> bool:
        """Return whether a plan is predicted to take longer than the present one was measured to, with no less room.

        The prediction for the present plan may be far from that measurement, on a host whose speed changes.
        """
        took = self._feedback.took
        if took is None or len(planned) != 1 or len(self._planned) != 1:
            return False
        (new,), (present,) = planned, self._planned
        return new.predicted is not None and new.asked >= present.asked and new.predicted.seconds > took * (1 - GAIN)

    def _say_failed(self, why: str) -> None:
        stays = "the plans there are stay" if self._planned else "all that is saved moves, as before the first plan"
        self._warn_once(FAILED, f"{why}; {stays}")

    def _warn_once(self, what: str, text: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            log.warning("%s", text)

    def _stay(self, planned: tuple[PlannedIteration, ...]) -> None:
        """Keep the present plans with new predictions, which are yet to be compared with measurements."""
        self._planned, self._under, self._is_cached = planned, 0, False
        self._feedback.budget.stayed()

    def _carry_out(self, plans: tuple[PlannedIteration, ...]) -> None:
        """Execute these plans from now on."""
        self._planned, self._under, self._has_planned = plans, 0, True
        self._is_cached = False
        self._feedback.adopted()
        for each in plans:
            log.info("iteration %d, plan by %s: %s", self._iterations, each.plan.policy, each)
            if each.refused is not None:
                self._warn_once(REFUSED, f"{each.refused.out_of(self._budget)}; it runs anyway, using more hbm")


def _obtainable(trace: Trace) -> set[str]:
    """Return the sites whose storages were recomputed bit for bit in a trial."""
    return {site.key for site in trace.sites if site.storage in trace.recipes}
