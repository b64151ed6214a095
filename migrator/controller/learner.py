"""Decides when plans are made and which plans hold, for one device.

Without torch and I/O: the learner takes in traces and measurements and returns plans; the caller decides who runs its
jobs. `migrator.controller.recordings` decides which iterations are recorded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import replace

from torch_tiers.migrator.controller.background import DEADLINE, at_once
from torch_tiers.migrator.controller.budget import SETTLING
from torch_tiers.migrator.controller.cached_plans import PlanCache
from torch_tiers.migrator.controller.cached_run import CachedRun
from torch_tiers.migrator.controller.corrections import Corrections
from torch_tiers.migrator.controller.feedback import Feedback
from torch_tiers.migrator.controller.in_force import PlansInForce
from torch_tiers.migrator.controller.outcome import IterationOutcome
from torch_tiers.migrator.controller.plan_requests import PlanRequests, Submit
from torch_tiers.migrator.controller.planned import hold_least, predict_all
from torch_tiers.migrator.controller.recordings import Recordings
from torch_tiers.migrator.controller.relief import NO_RELIEF, Relief
from torch_tiers.migrator.model.links import PCIE_GEN5, Links
from torch_tiers.migrator.model.plan import Plan
from torch_tiers.migrator.model.trace import Trace
from torch_tiers.migrator.policies import Policy
from torch_tiers.migrator.simulator import Simulated

log = logging.getLogger("tiers")

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
        Runs a job that takes longer than some milliseconds; its plans are adopted at the end of an iteration.
    recordings : int
        Iterations that are recorded before the first plan; see `migrator.model.timing`.
    must_fit : bool
        Whether a target that no plan meets is an error; else the plan that comes closest is executed, with a warning.
    budget : int, optional
        The user's budget, of which the target is a part; errors name it. By default the target.
    plan_cache : PlanCache, optional
        Plans of earlier runs of the program.
    warned : set of str, optional
        Warnings that were given already: the threads of a device come and go, and one warning is enough.
    begun : int
        Iterations of the program before it, which logs count, too.
    without_layout : int
        Bytes of the target that plans leave free where iterations differ in size: no layout serves all of them.
    relief : Relief
        Demotes state, and streams weights; iterations for which weights are streamed are recorded anew.
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
        begun: int = 0,
        without_layout: int = 0,
        relief: Relief = NO_RELIEF,
    ) -> None:
        self._target = target
        self._cached = CachedRun(plan_cache, target)
        self._without_layout = without_layout
        self._static: Callable[[], int] = int  # bytes in use between iterations
        self._requests = PlanRequests(policy, submit, relief, must_fit=must_fit)
        self._in_force = PlansInForce(target if budget is None else budget, set() if warned is None else warned, relief)
        self._feedback = Feedback(target, links)
        self._recordings = Recordings(recordings)
        self._iterations = self._begun = begun
        # Whether any iteration was whole; something was recorded since plans were taken over; plans are to be asked
        # for, for what was recorded; the next forward makes room for other plans.
        self._whole = self._afresh = self._due = self._relieved = False

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
        """Return whether iteration times confirmed the plans, perhaps of a program that makes no optimizer step."""
        return self._has_all and self._feedback.settled

    @property
    def _has_all(self) -> bool:
        return bool(self._in_force.planned) and not self._requests.asked and not self._recordings.due

    @property
    def plans(self) -> tuple[Plan, ...]:
        """Return one plan for each of `traces`."""
        return self._in_force.plans

    @property
    def predictions(self) -> tuple[Simulated | None, ...]:
        """Return the prediction for each of `plans`; None if its trace does not suffice."""
        return tuple(each.predicted for each in self._in_force.planned)

    @property
    def traces(self) -> tuple[Trace, ...]:
        """Return one trace for each kind of iteration that there are plans for, the one recorded last at the end."""
        return self._in_force.traces

    @property
    def iterations_in_force(self) -> int:
        """Return how many iterations have ended under `plans`, and with what is predicted of them now."""
        return self._in_force.iterations

    @property
    def varies(self) -> bool:
        """Return whether iterations of a kind differ in size more often than not."""
        return self._recordings.varies

    @property
    def corrections(self) -> Corrections:
        """Return what measurements have corrected of recorded times and of the links."""
        return self._feedback.corrections

    def iteration_over(self, outcome: IterationOutcome) -> bool:
        """Take in one iteration; return whether `plans` changed.

        Raises
        ------
        NoPlanFits
            If the target is too small for any plan, and there was none yet.
        """
        self._iterations += 1
        self._in_force.iterations += 1
        self._static = outcome.static
        trace, time = outcome.trace, outcome.iteration_time
        if time is not None and time.age >= self._in_force.iterations:
            time = None  # of an iteration under other plans
        if outcome.whole and not self._whole:
            self._whole = True
            # The patience was too short: what was recorded lacks the optimizer's state. What is remembered does not.
            if self._recordings.traces and not self._cached.resumed:
                self._record_anew()
        had_plans = bool(self.plans)  # in the iteration that is over: without a plan nothing is foreseen
        changed = self._adopt()
        if self._relieved and not changed:  # the iteration that is over may have begun before that
            self._relieved, trace = False, None
            self._record_anew()
        if trace is not None and not (had_plans or changed) and self._resume_from_cache(trace):
            return True
        if not (outcome.whole or self._iterations - self._begun >= PATIENCE):
            return changed
        if trace is not None and trace.sites:
            return self._learn(trace, outcome.peak) or changed
        planned, asked = self._in_force.planned, self._requests.asked
        unlike = outcome.mispredicted or outcome.resized
        if not asked:  # what is mispredicted while plans are made is what they are made for
            self._recordings.pass_by(self._iterations, mispredicted=unlike and had_plans)
        if time is not None and self._in_force.iterations > SETTLING and not (outcome.refused or unlike):
            self._feedback.note(time)  # also while plans are made, which are to be better than that
        if changed or outcome.refused or asked or self._recordings.learning or not planned:
            return changed  # the measurements are those of a plan that is, or is about to be, replaced
        base = max(map(self._feedback.budget.before_correction, self.traces))
        seen = replace(outcome, iteration_time=None if outcome.mispredicted else time)
        self._feedback.budget.sizes_vary = self.varies
        if self._feedback.iteration_over(planned, base, seen):
            log.info("iteration %d, corrections changed: %s", self._iterations, self._feedback)
            return self._plan(may_stay=True)
        self._store()
        return False

    def _resume_from_cache(self, trace: Trace) -> bool:
        """Begin with the cached plans of an earlier run; return whether there are any."""
        found = None if self._in_force.any_yet else self._cached.find(trace, self._feedback.given, self._static)
        if found is None:
            return False
        self._feedback.resume(found.corrections)
        self._recordings.resume(found.traces)
        request = self._feedback.request(found.traces)
        self._in_force.resume(predict_all(found.plans, request), request.traces, found)
        self._begin()
        log.info("iteration %d, begins with cached plans of an earlier run", self._iterations)
        self._cached.begun(found.plans, trace)
        return True

    def follow(self, before: Learner) -> bool:
        """Plan for what another learner has recorded for another target, and wait; return whether there are plans.

        There are none where the other has not recorded enough, or no plan holds as little as the target.

        Raises
        ------
        NoPlanFits
            If the target is too small for any plan, and it has to hold.
        """
        if before._recordings.learning:
            return False
        self._recordings, self._iterations, self._whole = before._recordings, before._iterations, before._whole
        self._in_force.state, self._in_force.streamed = before._in_force.state, before._in_force.streamed
        if self._resume_from_cache(self._recordings.traces[-1]):
            return True
        self._afresh = True
        self._plan_and_wait()
        if not self._in_force.planned or hold_least(self._in_force.planned):
            self.forget()
            return False
        return True

    def _plan_and_wait(self) -> None:
        self._plan()
        waited = self._requests.asked
        if waited and not self._requests.wait(DEADLINE) and not self._requests.asked:
            self._in_force.say_failed(f"no plan could be made within {DEADLINE:g} s")
        self._adopt()

    def _store(self) -> None:
        """Cache what was learned for the next run, once it proved right."""
        proved = self.settled and self._in_force.are_for(self._recordings.traces)
        if proved and self._cached.store(self._in_force, self._feedback, self._static):
            log.info("iteration %d, the plans proved right and are cached for the next run", self._iterations)

    def _learn(self, trace: Trace, peak: int) -> bool:
        verdict = self._cached.verify(self._in_force, trace, peak)
        if verdict.differs:
            log.info("iteration %d, the program differs from that of the cached plans", self._iterations)
            self._record_anew()
        if self._recordings.add(trace, self._iterations):
            self._afresh = self._due = True
            self._feedback.news()
            self._feedback.budget.estimate(peak)
        if self._recordings.due or not self._due:  # to make plans and to begin with them takes longer than to look
            return verdict.completes  # trials allow what the cached plans recompute: actions are to be looked up anew
        return self._plan()

    def do_without(self, keys: Collection[str]) -> bool:
        """Plan anew, as these sites' tensors cannot be recomputed after all; return whether `plans` changed."""
        return self._recordings.do_without(keys) and not self._recordings.learning and self._plan()

    def relink(self, links: Links) -> bool:
        """Plan with other `links` from now on, corrected as before; return whether `plans` changed.

        The present plans hold until others are ready, and stay if these are no better while others use the memory bus.

        Raises
        ------
        NoPlanFits
            If the target is too small for any plan, and there was none yet.
        """
        if links == self._feedback.given:
            return False
        self._feedback.relink(links)
        if self._recordings.learning or not (self.plans or self._requests.asked):
            return False
        return self._plan(may_stay=links.contended)

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
        self._plan_and_wait()

    def finish(self) -> None:
        """Wait for plans that are being made, as reports at the program's end describe them."""
        if self._requests.wait(AT_THE_END):
            self._adopt()
        self._store()

    def forget(self) -> None:
        """Begin anew, as the plans cannot be executed."""
        self._in_force.forget()
        self._record_anew()

    def _record_anew(self) -> None:
        """Forget the traces; the present plans hold until there are others."""
        self._recordings.begin_anew()
        self._cached.forget()
        self._requests.drop()
        self._feedback = Feedback(self._target, self._feedback.given)

    def _plan(self, *, may_stay: bool = False) -> bool:
        """Ask for plans; return whether there are others already. Those in force `may_stay` if they are as good."""
        self._due = False
        traces = self._recordings.traces
        self._feedback.budget.free = self._without_layout if self._recordings.varies else 0
        present = self._in_force.planned if may_stay and self._in_force.are_for(traces) else ()
        self._requests.ask(self._feedback.request(traces, present), traces)
        return self._adopt()

    def _adopt(self) -> bool:
        """Adopt plans that are ready; return whether they differ from the present ones."""
        differ = self._in_force.take_over(self._requests, self._feedback.took, afresh=self._afresh)
        if differ is None:
            return False
        self._recordings.demoted(self._in_force.gone, self._in_force.without_state)
        if self._afresh:
            self._recordings.planned(self._iterations)
        self._afresh = False
        self._cached.changed()
        if differ:
            self._begin()
        else:
            # To begin with a plan anew costs steps of seconds.
            self._feedback.budget.stayed()
            log.info("iteration %d, the plans stay: %s", self._iterations, "; ".join(map(str, self._in_force.planned)))
        return differ

    def _begin(self) -> None:
        """Begin with other plans."""
        self._feedback.adopted()
        for each in self._in_force.planned:
            log.info("iteration %d, plan by %s: %s", self._iterations, each.plan.policy, each)
        self._relieved = self._in_force.relieve_or_warn()
