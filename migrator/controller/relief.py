"""Decides how much optimizer state is demoted to DRAM, to make room in HBM for saved tensors. Pure.

Saved tensors and state share one budget. A byte of state in DRAM costs the same in each step, however many there are.
What a byte of room gains does not: it jumps where one more large tensor fits. So several amounts are estimated by a
short search, and the best is planned for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from torch_tiers.migrator.controller.planned import PlannedIteration, PlanRequest, plan_all, with_overflow
from torch_tiers.migrator.policies import Policy
from torch_tiers.migrator.policies.auto import estimate

PARTS = 8  # amounts of state that are estimated: one eighth, two eighths, up to all
WORTH = 0.02  # of an iteration: the least gain for which state is demoted, about the error of a prediction


@dataclass(frozen=True, slots=True)
class DemotableState:
    """Optimizer state in HBM that may be demoted: it comes to HBM for each step then, in slices.

    Attributes
    ----------
    nbytes : int
        Bytes of it.
    iterations : float
        Iterations of a step, which share what that takes.
    """

    nbytes: int
    iterations: float


class Relief(Protocol):
    """What can be done on one device for more room in HBM."""

    def demotable(self) -> DemotableState | None:
        """Return what state may be demoted; None if there is none."""

    def demote(self, nbytes: int) -> int:
        """Have so much state demoted when the next forward begins; return how many bytes of it will be."""

    def stream_weights(self, nbytes: int) -> bool:
        """Have frozen weights streamed from the next forward on, as HBM lacks `nbytes`; return whether that helps."""


class NoRelief:
    """A device on which nothing can be demoted or streamed."""

    def demotable(self) -> DemotableState | None:
        """Return None."""

    def demote(self, nbytes: int) -> int:
        """Return 0."""
        return 0

    def stream_weights(self, nbytes: int) -> bool:
        """Return False."""
        return False


NO_RELIEF = NoRelief()


def plan_with_state(
    policy: Policy, request: PlanRequest, state: DemotableState | None, *, must_fit: bool
) -> tuple[PlannedIteration, ...]:
    """Make a plan for each trace, and say how much state to demote for it.

    State is demoted only if iterations take at least 2% less then, its own transfers included.

    Raises
    ------
    NoPlanFits
        If there is none for the budget, and it `must_fit`.
    """
    planned = plan_all(policy, request, must_fit=must_fit)
    timed = all(each.predicted is not None for each in planned) and all(trace.times for trace in request.traces)
    nbytes = _amount(planned, request, state) if state is not None and timed else 0
    if state is None or not nbytes:
        return planned
    without = _without(request, nbytes)
    others = tuple(replace(each, demoted=nbytes) for each in plan_all(policy, without, must_fit=False))
    seconds = _seconds(others, without) + _transfers(nbytes, state, request)
    return others if seconds < _enough(planned, request) else planned


def _amount(planned: tuple[PlannedIteration, ...], request: PlanRequest, state: DemotableState) -> int:
    """Return the bytes of state with which iterations are estimated to be the fastest; 0 if no amount pays.

    Estimates are of the policy `auto`, whatever the policy: its own plan is to confirm them.
    """
    most, lacking = min(state.nbytes, request.links.dram), max(each.exceeds for each in planned)
    if lacking >= most:
        return most
    ideal, enough = sum(each.predicted.ideal for each in planned if each.predicted), _enough(planned, request)
    found = []
    for nbytes in sorted({lacking, *(most * part // PARTS for part in range(1, PARTS + 1))} - {0}):
        transfers = _transfers(nbytes, state, request)
        if nbytes >= lacking and ideal + transfers < enough:  # else no plan fits, or none is fast enough
            without = _without(request, nbytes)
            pairs = zip(without.traces, without.corrected_budgets, strict=True)
            found.append((sum(estimate(*pair, without.links) for pair in pairs) + transfers, nbytes))
    seconds, best = min(found, default=(enough, 0))
    return best if seconds < enough else 0


def _without(request: PlanRequest, nbytes: int) -> PlanRequest:
    """Return what is to be asked for if so much state lies in DRAM, where it leaves less room."""
    traces = tuple(trace.without_state(nbytes) for trace in request.traces)
    return replace(request, traces=traces, links=request.links.without_dram(nbytes))


def _transfers(nbytes: int, state: DemotableState, request: PlanRequest) -> float:
    """Return the seconds for which all the iterations wait for so much state, which comes and goes at once."""
    return len(request.traces) * 2 * nbytes / request.links.both / state.iterations


def _enough(planned: tuple[PlannedIteration, ...], request: PlanRequest) -> float:
    """Return the seconds than which the iterations have to be faster."""
    return _seconds(planned, request) * (1 - WORTH)


def _seconds(planned: tuple[PlannedIteration, ...], request: PlanRequest) -> float:
    return sum(with_overflow(each.predicted, each.asked, request.links) for each in planned if each.predicted)
