"""Which plans take over from those in force, and what is said where none do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.learners import MODEL, peak_of
from torch_tiers.migrator.controller.background import at_once
from torch_tiers.migrator.controller.in_force import PlansInForce
from torch_tiers.migrator.controller.plan_requests import PlanRequests
from torch_tiers.migrator.controller.planned import GAIN, PlannedIteration, PlanRequest, following, plan_all
from torch_tiers.migrator.controller.relief import NO_RELIEF
from torch_tiers.migrator.model.links import PCIE_GEN5
from torch_tiers.migrator.model.plan import NoPlanFits
from torch_tiers.migrator.policies import POLICIES

BUDGET = peak_of(MODEL) * 3 // 4
REQUEST = PlanRequest((MODEL,), (BUDGET,), 0, PCIE_GEN5)


def take_over(in_force: PlansInForce, request: PlanRequest, *, afresh: bool = False) -> bool | None:
    requests = PlanRequests(POLICIES["auto"], at_once, NO_RELIEF, must_fit=True)
    requests.ask(request, request.traces)
    return in_force.take_over(requests, None, afresh=afresh)


def made(name: str) -> PlannedIteration:
    (planned,) = plan_all(POLICIES[name], REQUEST)
    return planned


def test_plans_that_are_the_same_do_not_take_over_unless_something_was_recorded_since() -> None:
    in_force = PlansInForce(BUDGET, set(), NO_RELIEF)
    assert (
        in_force.take_over(PlanRequests(POLICIES["auto"], at_once, NO_RELIEF, must_fit=True), None, afresh=False)
        is None
    )
    assert take_over(in_force, REQUEST) and in_force.are_for(REQUEST.traces)
    before = in_force.plans
    in_force.iterations = 5
    assert take_over(in_force, REQUEST) is False
    assert in_force.plans == before and in_force.iterations == 0, "with a prediction of which no iteration has told yet"
    assert take_over(in_force, REQUEST, afresh=True)
    assert not in_force.are_for((replace(MODEL),)), "but for these very traces"


def test_where_no_plan_fits_those_in_force_stay_and_that_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    in_force, little = PlansInForce(BUDGET, set(), NO_RELIEF), replace(REQUEST, budgets=(BUDGET // 100,))
    with pytest.raises(NoPlanFits):
        take_over(in_force, little)
    take_over(in_force, REQUEST)
    assert [take_over(in_force, little) for _ in range(2)] == [None, None]
    assert in_force.plans and len(caplog.records) == 1


def test_a_plan_stays_that_was_measured_to_take_less_than_another_is_predicted_to() -> None:
    present, other = (made("auto"),), (made("flashneuron"),)
    assert other[0].predicted is not None
    seconds = other[0].predicted.seconds
    request = replace(REQUEST, present=present)
    for took, stays in ((seconds, True), (seconds * (1 + 2 * GAIN), False)):
        (found,) = following(other, present, request, took, afresh=False)
        assert (found.plan is present[0].plan) == stays
        assert following(other, present, request, took, afresh=True)[0].plan is not present[0].plan
        assert following(other, present, REQUEST, took, afresh=False)[0].plan is not present[0].plan, "it may not stay"
