"""Room in HBM for plans, besides what saved tensors free: frozen weights are streamed, optimizer state gives way.

Activations and state share one budget. State in DRAM comes to HBM for each step, in slices, which costs the same for
each of its bytes. What a byte of room is worth to plans changes by leaps, as where the loss's input begins to have
room. So several amounts are looked at, by a short search, and the best is planned for. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from torch_tiers.migrator.controller.planned import (
    PlannedIteration,
    PlanRequest,
    plan_all,
    relieved,
    with_overflow,
)
from torch_tiers.migrator.policies import Policy
from torch_tiers.migrator.policies.auto import glance

PARTS = 8  # of the state: so many amounts of it are looked at, up to all
WORTH = 0.02  # of an iteration: what plans are to gain by it, as predictions are about as far off


@dataclass(frozen=True, slots=True)
class StateOffer:
    """Optimizer state that may give way to saved tensors.

    Attributes
    ----------
    nbytes : int
        Bytes of it that lie in HBM.
    seconds : float
        What an iteration takes longer for each of them that comes to HBM for each step.
    """

    nbytes: int
    seconds: float


class Relief(Protocol):
    """What can be done on one device for more room in HBM."""

    def offer(self) -> StateOffer | None:
        """Return what state may give way; None if there is none, or some was asked to already."""

    def give_way(self, nbytes: int) -> int:
        """Have so much state lie in DRAM from the next forward on; return how many bytes of it will."""

    def stream_weights(self, nbytes: int) -> bool:
        """Have frozen weights streamed from the next forward on, as HBM lacks `nbytes`; return whether that helps."""


class NoRelief:
    """That of a device on which nothing gives way."""

    def offer(self) -> StateOffer | None:
        """Return None."""

    def give_way(self, nbytes: int) -> int:
        """Return 0."""
        return 0

    def stream_weights(self, nbytes: int) -> bool:
        """Return False."""
        return False


NO_RELIEF = NoRelief()


def plan_with_state(
    policy: Policy, request: PlanRequest, offer: StateOffer | None, *, must_fit: bool
) -> tuple[PlannedIteration, ...]:
    """Make a plan for each trace, and have as much state give way as makes iterations the fastest.

    Raises
    ------
    NoPlanFits
        If there is none for the budget, and it `must_fit`.
    """
    planned = plan_all(policy, request, must_fit=must_fit)
    if offer is None or any(each.predicted is None for each in planned):
        return planned

    def seconds(of: tuple[PlannedIteration, ...]) -> float:
        return sum(with_overflow(each.predicted, each.asked, request.links) for each in of if each.predicted)

    def cost(relief: int) -> float:
        return len(planned) * relief * offer.seconds

    ideal, enough = sum(each.predicted.ideal for each in planned if each.predicted), seconds(planned) * (1 - WORTH)
    lacking = max(each.exceeds for each in planned)
    amounts = {offer.nbytes * part // PARTS for part in range(1, PARTS + 1)} | {min(lacking, offer.nbytes)}
    looked_at = [
        (_glance(request, relief) + cost(relief), relief)
        for relief in sorted(amounts - {0})
        if relief >= min(lacking, offer.nbytes) and ideal + cost(relief) < enough  # else no plan is as fast
    ]
    relief = min(looked_at, default=(0.0, 0))[1]
    if not relief:
        return planned
    wider = replace(request, traces=tuple(relieved(trace, relief) for trace in request.traces))
    others = tuple(replace(each, relief=relief) for each in plan_all(policy, wider, must_fit=False))
    return others if seconds(others) + cost(relief) < enough else planned


def _glance(request: PlanRequest, relief: int) -> float:
    """Return about what the iterations take if so much state gives way."""
    pairs = zip(request.traces, request.budgets, strict=True)
    return sum(
        glance(relieved(trace, relief), max(0, budget + request.correction), request.links) for trace, budget in pairs
    )
