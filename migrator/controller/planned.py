"""Plans with their predictions: makes them by a policy, in this process or beside it, and compares them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch_tiers.allocator.sizes import format_size
from torch_tiers.migrator.model.links import Links
from torch_tiers.migrator.model.plan import NoPlanFits, Plan
from torch_tiers.migrator.model.trace import Trace
from torch_tiers.migrator.planner.low_traffic import crossing, is_low_traffic
from torch_tiers.migrator.policies import POLICIES, Policy
from torch_tiers.migrator.simulator import Simulated, simulate

LARGER = (0, 1 / 32, 1 / 16)  # of the smallest budget that there is a plan for: by so much more others are made for
CROSSINGS = 3  # of the link by what exceeds the budget: an operator writes it, and others read it, in host memory
GAIN = 0.002  # of the step: what other plans have to promise, as to begin with one costs steps of seconds


@dataclass(frozen=True, slots=True)
class PlannedIteration:
    """A plan and its prediction.

    Attributes
    ----------
    predicted : Simulated or None
        The prediction; None if the trace does not suffice for one.
    refused : NoPlanFits or None
        Why the plan exceeds the budget, if it does.
    least : bool
        Whether no plan holds less.
    asked : int
        The budget that the policy was given, in bytes.
    stays : bool
        Whether it is the present plan. A plan from another process is a copy, with groups of its own.
    demoted : int
        Bytes of optimizer state to demote. The plan is made for its trace without them.
    """

    plan: Plan
    predicted: Simulated | None
    refused: NoPlanFits | None = None
    least: bool = False
    asked: int = 0
    stays: bool = False
    demoted: int = 0

    def after(self, before: PlannedIteration, *, afresh: bool = False) -> PlannedIteration:
        """Return the same, with the present plan itself if that stays or the new one equals it.

        `least` is set if a policy that never refuses was asked for less than `before`, in vain; or for no more than a
        plan that was `least`, unless the trace is new (`afresh`).
        """
        in_vain = self.asked < before.asked and self.peak() >= max(before.peak(), self.asked + 1)
        as_before = before.least and not afresh and self.asked <= before.asked and self.peak() >= before.peak()
        unchanged = self.stays or self.plan.is_the_same_as(before.plan)
        plan = before.plan if unchanged else self.plan
        return replace(self, plan=plan, least=self.least or in_vain or as_before)

    @property
    def exceeds(self) -> int:
        """Return by how many bytes the plan exceeds the budget, for which there is none."""
        return 0 if self.refused is None else self.refused.smallest - self.refused.budget

    def peak(self) -> int:
        """Return the most bytes in HBM; 0 if that was not predicted."""
        return 0 if self.predicted is None else self.predicted.peak["hbm"]

    def __str__(self) -> str:
        plan, predicted = self.plan, self.predicted
        does = (
            f"{format_size(plan.kept_bytes)} stay, {format_size(plan.moved_bytes)} move in {len(plan.groups)} groups, "
            f"{len(plan.recompute)} tensors are recomputed"
        )
        if predicted is None:
            return does
        step = f"{predicted.seconds * 1e3:.1f} ms, {predicted.fraction:.3f} of ideal, in " if predicted.ideal else ""
        return f"{does}; predicted: {step}{format_size(predicted.peak['hbm'])} of hbm"


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What plans are asked for.

    Attributes
    ----------
    traces : tuple of Trace
        One for each kind of iteration, with corrected times.
    budgets : tuple of int
        One for each trace, to which the `correction` is added.
    present : tuple of PlannedIteration
        The present plans for these traces, each of which stays unless the new one is better; none: all are new.
    """

    traces: tuple[Trace, ...]
    budgets: tuple[int, ...]
    correction: int
    links: Links
    present: tuple[PlannedIteration, ...] = ()

    @property
    def corrected_budgets(self) -> tuple[int, ...]:
        """Return the corrected budget for each trace, in bytes."""
        return tuple(max(0, budget + self.correction) for budget in self.budgets)


def plan_all(policy: Policy, request: PlanRequest, *, must_fit: bool = True) -> tuple[PlannedIteration, ...]:
    """Make a plan for each trace, for its corrected budget; raise NoPlanFits if there is none and it `must_fit`."""
    pairs = zip(request.traces, request.budgets, strict=True)
    correction, links = request.correction, request.links
    planned = [_plan_one(policy, trace, budget, correction, links, must_fit=must_fit) for trace, budget in pairs]
    if request.present:
        planned = [_better(*each, links) for each in zip(planned, request.present, request.traces, strict=True)]
    return tuple(planned)


def needs(trace: Trace, links: Links) -> int:
    """Return the bytes of HBM that an iteration needs if everything stays there."""
    return simulate(trace, links, POLICIES["keep"](trace, trace.saved_bytes, links)).peak["hbm"]


def predict_all(plans: Sequence[Plan], request: PlanRequest) -> tuple[PlannedIteration, ...]:
    """Return plans that were made earlier for what is asked for, with predictions."""
    return tuple(
        PlannedIteration(plan, simulate(trace, request.links, plan), asked=budget)
        for plan, trace, budget in zip(plans, request.traces, request.corrected_budgets, strict=True)
    )


def following(
    planned: tuple[PlannedIteration, ...],
    present: tuple[PlannedIteration, ...],
    request: PlanRequest,
    took: float | None,
    *,
    afresh: bool,
) -> tuple[PlannedIteration, ...]:
    """Return the plans that follow the present ones: these themselves with new predictions, if they stay.

    Parameters
    ----------
    took : float or None
        Seconds that iterations under the present plan were measured to take.
    afresh : bool
        Whether something was recorded since: replays may hold for more than they did.
    """
    if len(planned) != len(present):
        return planned
    planned = tuple(new.after(old, afresh=afresh) for new, old in zip(planned, present, strict=True))
    if took is None or afresh or not len(planned) == len(request.present) == 1:
        return planned
    (new,), (old,), (trace,) = planned, present, request.traces
    # The prediction for the present plan may be far from what it was measured to take, on a host whose speed changes.
    if new.predicted is None or new.asked < old.asked or new.predicted.seconds <= took * (1 - GAIN):
        return planned
    return (replace(new, plan=old.plan, asked=old.asked, predicted=simulate(trace, request.links, old.plan)),)


def hold_least(planned: Sequence[PlannedIteration]) -> bool:
    """Return whether no plans hold less; of several, the one that is predicted to hold most counts."""
    if all(each.predicted is not None for each in planned):
        return max(planned, key=PlannedIteration.peak).least
    return all(each.least for each in planned)


def _better(planned: PlannedIteration, present: PlannedIteration, trace: Trace, links: Links) -> PlannedIteration:
    """Return the new plan; or the present one, if it is as good by now and was made for no more room."""
    if planned.predicted is None or planned.asked < present.asked:
        return planned
    predicted = simulate(trace, links, present.plan)
    fits = predicted.peak["hbm"] <= max(planned.asked, planned.peak()) and present.plan.stored_bytes <= links.below
    moves_more = crossing(present.plan, links) > crossing(planned.plan, links)
    if links.contended and moves_more and not is_low_traffic(present.plan, links, predicted.seconds):
        return planned  # of plans that are about as fast, one that moves less
    if not fits or predicted.seconds > planned.predicted.seconds * (1 + GAIN):
        return planned
    return replace(planned, plan=present.plan, predicted=predicted, stays=True)


def _plan_one(
    policy: Policy, trace: Trace, budget: int, correction: int, links: Links, *, must_fit: bool
) -> PlannedIteration:
    refused, least, asked = None, False, max(0, budget + correction)
    try:
        plan = policy(trace, asked, links)
    except NoPlanFits as error:
        least = True
        if error.smallest > budget:
            refused = NoPlanFits(budget, error.smallest, error.holds)
            if must_fit:
                raise refused from None
            plan = _fastest(policy, trace, error.smallest, asked, links)
        else:  # feedback asks for less than there is a plan for
            plan = policy(trace, error.smallest, links)
    return PlannedIteration(plan, simulate(trace, links, plan) if trace.others else None, refused, least, asked)


def _fastest(policy: Policy, trace: Trace, smallest: int, asked: int, links: Links) -> Plan:
    """Return the plan that is the fastest with what exceeds the budget in host memory, of the smallest and larger ones.

    The smallest offloads all that can be, though it may exceed the budget only while one operator runs.
    """
    if not trace.others:
        return policy(trace, smallest, links)

    def seconds(plan: Plan) -> float:
        return with_overflow(simulate(trace, links, plan), asked, links)

    return min((policy(trace, int(smallest * (1 + part)), links) for part in LARGER), key=seconds)


def with_overflow(predicted: Simulated, budget: int, links: Links) -> float:
    """Return the seconds of an iteration whose excess over the budget, in bytes, lies in host memory."""
    return predicted.seconds + CROSSINGS * max(0, predicted.peak["hbm"] - budget) / links.h2d
