"""State gives way to saved tensors where iterations are the faster for it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.learners import MODEL, Gives, peak_of
from tests.unit.migrator.controller.test_cached_plans import Kept, over
from torch_tiers.allocator.sizes import GiB
from torch_tiers.migrator.controller.learner import Learner
from torch_tiers.migrator.controller.outcome import IterationOutcome
from torch_tiers.migrator.controller.planned import PlannedIteration, PlanRequest
from torch_tiers.migrator.controller.relief import StateOffer, plan_with_state
from torch_tiers.migrator.model.links import PCIE_GEN5
from torch_tiers.migrator.policies import POLICIES

LITTLE = max(MODEL.others) * 3 // 2
"""Bytes in which there is a plan, of which most of an iteration is waiting."""
STATE = min(MODEL.others)
FREE = StateOffer(STATE, 0.0)
DEAR = StateOffer(STATE, 1.0)


def made(offer: StateOffer | None, budget: int = LITTLE) -> PlannedIteration:
    request = PlanRequest((MODEL,), (budget,), 0, PCIE_GEN5)
    (planned,) = plan_with_state(POLICIES["auto"], request, offer, must_fit=False)
    return planned


def seconds(planned: PlannedIteration) -> float:
    assert planned.predicted is not None
    return planned.predicted.seconds


def test_state_that_costs_nothing_gives_way() -> None:
    planned = made(FREE)
    assert 0 < planned.relief <= STATE
    assert seconds(planned) < 0.95 * seconds(made(None))
    assert planned.peak() <= LITTLE, "without that state"


def test_state_stays_where_it_costs_more_than_it_gains() -> None:
    assert made(DEAR).relief == 0
    assert made(DEAR).plan.is_the_same_as(made(None).plan)


def test_state_stays_where_all_saved_tensors_have_room() -> None:
    assert made(FREE, 2 * peak_of(MODEL)).relief == 0


@pytest.mark.parametrize("per_gib", [0.2e-3, 1e-3, 5e-3])
def test_what_gives_way_pays(per_gib: float) -> None:
    """The dearer it is, the less gives way, and iterations are faster with what it costs."""
    offer = StateOffer(STATE, per_gib / GiB)
    planned = made(offer)
    assert planned.relief <= made(FREE).relief
    assert seconds(planned) + planned.relief * offer.seconds <= seconds(made(None))


def test_state_gives_way_if_no_plan_fits_without() -> None:
    """What exceeds the budget would be read in host memory."""
    little = max(MODEL.others) * 9 // 10
    assert made(None, little).refused is not None
    planned = made(StateOffer(STATE, 1 / PCIE_GEN5.both), little)
    assert planned.refused is None and planned.relief > 0


def test_less_state_than_is_lacking_gives_way_and_what_is_lacking_yet_is_told() -> None:
    little = max(MODEL.others) // 2
    lacks = made(None, little).exceeds
    planned = made(StateOffer(lacks // 2, 0.0), little)
    assert planned.relief == lacks // 2
    assert planned.exceeds == pytest.approx(lacks - planned.relief, rel=0.05)


def test_a_learner_has_state_give_way_once_and_plans_on_with_what_it_recorded() -> None:
    relief = Gives([], FREE)
    learner = Learner(POLICIES["auto"], LITTLE, must_fit=False, relief=relief)
    assert learner.iteration_over(IterationOutcome(MODEL, 0))
    assert relief.gone == [made(FREE).relief] and not relief.asked
    (trace,), (predicted,) = learner.traces, learner.predictions
    assert predicted is not None and predicted.peak["hbm"] <= LITTLE
    assert max(trace.others) == max(MODEL.others) - relief.gone[0]
    plans = learner.plans
    for _ in range(3):
        assert not learner.records_next
        learner.iteration_over(IterationOutcome(None, predicted.peak["hbm"]))
    assert learner.plans == plans and len(relief.gone) == 1
    slower = replace(PCIE_GEN5, h2d=PCIE_GEN5.h2d / 2)
    learner.relink(slower)
    assert max(learner.traces[0].others) == max(trace.others), "what is planned for later, too, is without that state"


def test_a_run_that_begins_with_cached_plans_has_as_much_state_give_way() -> None:
    cache, first, second = Kept(), Gives([], FREE), Gives([], FREE)
    for relief in (first, second):
        learner = Learner(POLICIES["auto"], LITTLE, must_fit=False, relief=relief, plan_cache=cache)
        without = (replace(MODEL, others=tuple(each - sum(first.gone) for each in MODEL.others)), MODEL)
        for number in range(20):
            over(learner, without[number == 0] if learner.records_next else None)
        assert cache.files
    assert second.gone == first.gone
