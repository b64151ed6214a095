"""Room in HBM for plans, besides what saved tensors free: frozen weights are streamed, optimizer state gives way.

Activations and state share one budget. State in DRAM comes to HBM for each step, in slices, which costs the same for
each of its bytes. Each further byte of room is worth less to plans than the one before. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch_tiers.migrator.controller.planned import (
    PlannedIteration,
    PlanRequest,
    plan_all,
    with_more_room,
    with_overflow,
)
from torch_tiers.migrator.policies import Policy

PARTS = 8  # of the state: so many amounts of it are tried, up to all
WORTH = 0.02  # of an iteration: what plans are to gain by it, as what is recorded with that room is planned once more


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
    """What one device can do for more room in HBM."""

    def offer(self) -> StateOffer | None:
        """Return what state may give way; None if there is none, or some was asked to already."""

    def make_room(self, nbytes: int) -> bool:
        """Make so much room when the next forward begins; return whether there will be, or about as much."""


class NoRelief:
    """That of a device on which nothing gives way."""

    def offer(self) -> StateOffer | None:
        """Return None."""

    def make_room(self, nbytes: int) -> bool:
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
    best = plan_all(policy, request, must_fit=must_fit)
    if offer is None or any(each.predicted is None for each in best):
        return best

    def seconds(planned: tuple[PlannedIteration, ...], relief: int) -> float:
        took = (with_overflow(each.predicted, each.asked, request.links) for each in planned if each.predicted)
        return sum(took) + cost(relief)

    def cost(relief: int) -> float:
        return len(best) * relief * offer.seconds

    ideal, fastest = sum(each.predicted.ideal for each in best if each.predicted), seconds(best, 0)
    lacking = max(each.exceeds for each in best)
    amounts = {offer.nbytes * part // PARTS for part in range(1, PARTS + 1)}
    for relief in sorted(amounts | {min(lacking, offer.nbytes)} - {0}):
        if ideal + cost(relief) > fastest * (1 - WORTH):
            break  # no plan is as fast
        planned = with_more_room(policy, request, relief)
        if seconds(planned, relief) > fastest * (1 - WORTH):
            break
        best, fastest = planned, seconds(planned, relief)
    return best
