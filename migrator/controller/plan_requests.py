"""Requests plans, which are made at once if that takes some milliseconds, and else in a process beside the program."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from torch_tiers.allocator.errors import TiersError
from torch_tiers.migrator.controller.background import give_up, in_thread
from torch_tiers.migrator.controller.planned import PlannedIteration, PlanRequest
from torch_tiers.migrator.controller.relief import Relief, plan_with_state
from torch_tiers.migrator.model.plan import NoPlanFits
from torch_tiers.migrator.model.trace import Trace
from torch_tiers.migrator.policies import Policy

AT_ONCE = 100  # sites with times, up to which planning takes but some milliseconds


class PlanningFailed(TiersError):
    """No plan was made, for a reason that is not the program's; `__cause__` has it."""


Job = Callable[[], tuple[PlannedIteration, ...]]
Submit = Callable[[Job], "Future[tuple[PlannedIteration, ...]]"]


class PlanRequests:
    """The plans that one device has asked for; the last ones alone, as what was asked for before is of no use any more.

    Parameters
    ----------
    policy : Policy
        Makes them.
    submit : callable
        Has a job done that takes long.
    relief : Relief
        Tells what state may be demoted. It is asked only if the present plans may not stay.
    must_fit : bool
        Whether a budget that no plan meets is an error.
    """

    def __init__(self, policy: Policy, submit: Submit, relief: Relief, *, must_fit: bool) -> None:
        self._policy = policy
        self._submit = submit
        self._relief = relief
        self._must_fit = must_fit
        self._ordered: Future[tuple[PlannedIteration, ...]] | None = None
        self._request: tuple[PlanRequest, tuple[Trace, ...]]

    @property
    def asked(self) -> bool:
        """Whether there is something to be taken over, now or later."""
        return self._ordered is not None

    @property
    def under_way(self) -> bool:
        """Whether plans are being made."""
        return self._ordered is not None and not self._ordered.done()

    def ask(self, request: PlanRequest, recorded: tuple[Trace, ...]) -> None:
        """Ask for plans, for traces that were `recorded` before their times were corrected."""
        self.drop()
        self._request = request, recorded
        state = None if request.present else self._relief.demotable()
        quick = state is None and sum(len(trace.sites) for trace in request.traces if trace.times) <= AT_ONCE
        job = partial(plan_with_state, self._policy, request, state, must_fit=self._must_fit)
        self._ordered = (in_thread if quick else self._submit)(job)
        if quick:
            self._ordered.exception()  # waits; if a signal's handler raises here, the plans are taken over later

    def take(self) -> tuple[tuple[PlannedIteration, ...], PlanRequest, tuple[Trace, ...]] | None:
        """The plans, and what was asked for, once they are there.

        Raises
        ------
        NoPlanFits
            If there are none, and there must be.
        PlanningFailed
            If who makes them failed, or took too long.
        """
        if self._ordered is None or not self._ordered.done():
            return None
        ordered, self._ordered = self._ordered, None
        if (error := ordered.exception()) is None:
            return ordered.result(), *self._request
        if isinstance(error, NoPlanFits):
            raise error
        raise PlanningFailed(f"no plan could be made: {error!r}") from error

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until they are there, or for so long; whether they are. What is not there by then is not wanted."""
        try:
            return self._ordered is not None and self._ordered.exception(seconds) is None
        except TimeoutError:
            self.drop()
            return False

    def drop(self) -> None:
        """They are not wanted any more."""
        # Else a program of ever new kinds of iterations has ever more processes that compute what nobody takes.
        give_up(self._ordered)
        self._ordered = None
