"""The plans in force: replaces them when those that were asked for are ready, and warns if none could be made. Pure."""

from __future__ import annotations

import logging
from operator import is_

from torch_tiers.migrator.controller.cached_plans import CachedPlans
from torch_tiers.migrator.controller.plan_requests import PlanningFailed, PlanRequests
from torch_tiers.migrator.controller.planned import PlannedIteration, following
from torch_tiers.migrator.controller.relief import Relief
from torch_tiers.migrator.model.plan import NoPlanFits, Plan
from torch_tiers.migrator.model.trace import Trace

log = logging.getLogger("tiers")

REFUSED, FAILED = "no plan fits", "planning failed"  # what a user is warned of once


class PlansInForce:
    """The plans that are carried out until others are taken over.

    Parameters
    ----------
    budget : int
        The user's budget, which warnings name.
    warned : set of str
        Warnings that were given already.
    relief : Relief
        Is asked to make other room in HBM, where no plan fits or plans are faster with it.
    """

    def __init__(self, budget: int, warned: set[str], relief: Relief) -> None:
        self.planned: tuple[PlannedIteration, ...] = ()
        self.traces: tuple[Trace, ...] = ()  # what `planned` is for
        self.iterations = 0  # iterations that ended under them, and with what is predicted of them now
        self.any_yet = False  # whether there ever were any
        self.recorded: tuple[Trace, ...] = ()  # `traces` as they were recorded
        # Of the last plans: traces that state was taken from, each as recorded and without that state; its bytes; and
        # whether there was less of it than they are made without.
        self.without_state: tuple[tuple[Trace, Trace], ...] = ()
        self.gone, self.falls_short = 0, False
        self._budget = budget
        self._warned = warned
        self.streamed = 0  # bytes that HBM lacked, so that frozen weights are streamed
        self.state = 0  # bytes of state that was demoted for plans, these or earlier ones
        self._relief = relief

    @property
    def plans(self) -> tuple[Plan, ...]:
        """Return one plan for each of `traces`."""
        return tuple(each.plan for each in self.planned)

    def are_for(self, recorded: tuple[Trace, ...]) -> bool:
        """Return whether the plans are for these very traces: for newer ones no plan may have been possible."""
        return len(recorded) == len(self.recorded) and all(map(is_, recorded, self.recorded))

    def take_over(self, requests: PlanRequests, took: float | None, *, afresh: bool) -> bool | None:
        """Take over plans that are ready, and demote the state that they are made without.

        See `planned.following` for the parameters.

        Returns
        -------
        bool or None
            Whether they differ from those in force; None if none are ready.

        Raises
        ------
        NoPlanFits
            If no plan fits, and there was never one.
        """
        try:
            taken = requests.take()
        except NoPlanFits as error:
            if not self.any_yet:
                raise
            self._warn_once(REFUSED, f"{error.out_of(self._budget)}; the plans there are stay")
            return None
        except PlanningFailed as error:
            self.say_failed(str(error))
            return None
        if taken is None:
            return None
        planned, request, recorded = taken
        planned = following(planned, self.planned, request, took, afresh=afresh)
        differ = afresh or [each.plan for each in planned] != [each.plan for each in self.planned]
        traces, recorded = self._demote_state(planned, request.traces, recorded)
        self.begin(planned, traces, recorded)
        return differ

    def _demote_state(
        self, planned: tuple[PlannedIteration, ...], traces: tuple[Trace, ...], recorded: tuple[Trace, ...]
    ) -> tuple[tuple[Trace, ...], tuple[Trace, ...]]:
        """Demote the state that the plans are made without; return the traces without it."""
        wanted = max((each.demoted for each in planned), default=0)
        gone = self.gone = self._relief.demote(wanted) if wanted else 0
        self.falls_short = gone < wanted
        if not gone:
            self.without_state = ()
            return traces, recorded
        self.state += gone
        without = tuple(trace.without_state(gone) for trace in recorded)
        self.without_state = tuple(zip(recorded, without, strict=True))
        return tuple(trace.without_state(gone) for trace in traces), without

    def begin(
        self, planned: tuple[PlannedIteration, ...], traces: tuple[Trace, ...], recorded: tuple[Trace, ...]
    ) -> None:
        """Have these plans from now on, for traces with corrected times and as they were recorded."""
        self.planned, self.traces, self.recorded = planned, traces, recorded
        self.iterations, self.any_yet = 0, True

    def resume(self, planned: tuple[PlannedIteration, ...], traces: tuple[Trace, ...], found: CachedPlans) -> None:
        """Have the plans of an earlier run, and the room that it made for them."""
        if found.streamed and self._relief.stream_weights(found.streamed):
            self.streamed = found.streamed
        if found.state:
            self.state = self._relief.demote(found.state)
        self.begin(planned, traces, found.traces)

    def forget(self) -> None:
        """Have no plans, as these cannot be executed."""
        self.planned, self.traces = (), ()

    def relieve_or_warn(self) -> bool:
        """Return whether others are to be made for what is recorded anew; warn if these exceed the budget for good."""
        if self.falls_short:
            return True
        exceeds = max((each.exceeds for each in self.planned), default=0)
        # Once: plans that exceed the budget with that room are what there is.
        if exceeds and not self.streamed and self._relief.stream_weights(exceeds):
            self.streamed = exceeds
            return True
        self._say_refused()
        return False

    def _say_refused(self) -> None:
        """Warn once of plans that use more than the budget."""
        for each in self.planned:
            if each.refused is not None:
                what = each.refused.out_of(self._budget)
                self._warn_once(REFUSED, f"{what}; it runs anyway, with the rest in host memory")

    def say_failed(self, why: str) -> None:
        """Warn once that plans which were asked for were not made."""
        stays = "the plans there are stay" if self.planned else "all that is saved moves, as before the first plan"
        self._warn_once(FAILED, f"{why}; {stays}")

    def _warn_once(self, what: str, text: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            log.warning("%s", text)
