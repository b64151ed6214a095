"""State is demoted to make room for saved tensors, where iterations are the faster for it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tests.unit.learners import MODEL, Gives, peak_of
from tests.unit.migrator.controller.test_cached_plans import Kept, over
from tests.unit.modelled import gpt
from tests.unit.traces import chain
from torch_tiers.allocator.sizes import GiB, MiB
from torch_tiers.migrator.controller.cached_plans import CachedPlans
from torch_tiers.migrator.controller.learner import Learner
from torch_tiers.migrator.controller.outcome import IterationOutcome
from torch_tiers.migrator.controller.planned import PlannedIteration, PlanRequest
from torch_tiers.migrator.controller.recordings import Recordings
from torch_tiers.migrator.controller.relief import DemotableState, plan_with_state
from torch_tiers.migrator.model.links import PCIE_GEN5, Links
from torch_tiers.migrator.policies import POLICIES

LITTLE = max(MODEL.others) * 3 // 2
"""Bytes in which there is a plan, of which most of an iteration is waiting."""
STATE = min(MODEL.others)
FREE = DemotableState(STATE, math.inf)
DEAR = DemotableState(STATE, 1e-3)


def made(state: DemotableState | None, budget: int = LITTLE, links: Links = PCIE_GEN5) -> PlannedIteration:
    request = PlanRequest((MODEL,), (budget,), 0, links)
    (planned,) = plan_with_state(POLICIES["auto"], request, state, must_fit=False)
    return planned


def seconds(planned: PlannedIteration) -> float:
    assert planned.predicted is not None
    return planned.predicted.seconds


def test_state_that_costs_nothing_is_demoted() -> None:
    planned = made(FREE)
    assert 0 < planned.demoted <= STATE
    assert seconds(planned) < 0.95 * seconds(made(None))
    assert planned.peak() <= LITTLE, "without that state"


def test_state_stays_where_it_costs_more_than_it_gains() -> None:
    assert made(DEAR).demoted == 0
    assert made(DEAR).plan.is_the_same_as(made(None).plan)


def test_state_stays_where_all_saved_tensors_have_room() -> None:
    assert made(FREE, 2 * peak_of(MODEL)).demoted == 0


@pytest.mark.parametrize("iterations", [100, 10, 1])
def test_what_is_demoted_pays(iterations: float) -> None:
    """The dearer it is, the less is; and iterations are faster with what it costs."""
    planned = made(DemotableState(STATE, iterations))
    assert planned.demoted <= made(FREE).demoted
    transfers = 2 * planned.demoted / PCIE_GEN5.both / iterations
    assert seconds(planned) + transfers <= seconds(made(None))


def test_no_more_state_is_demoted_than_dram_holds_and_what_moves_has_the_rest() -> None:
    links = replace(PCIE_GEN5, dram=STATE // 2, below=STATE // 2)
    planned = made(FREE, links=links)
    assert planned.demoted + planned.plan.stored_bytes <= STATE // 2


def test_without_times_no_state_is_demoted() -> None:
    request = PlanRequest((chain([10 * MiB] * 40),), (100 * MiB,), 0, PCIE_GEN5)
    (planned,) = plan_with_state(POLICIES["auto"], request, FREE, must_fit=False)
    assert planned.demoted == 0


def test_state_is_demoted_if_no_plan_fits_without() -> None:
    """What exceeds the budget would be read in host memory."""
    little = max(MODEL.others) * 9 // 10
    assert made(None, little).refused is not None
    planned = made(DemotableState(STATE, 2), little)
    assert planned.refused is None and planned.demoted > 0


def test_less_state_than_is_lacking_is_demoted_and_what_is_lacking_yet_is_told() -> None:
    little = max(MODEL.others) // 2
    lacks = made(None, little).exceeds
    planned = made(DemotableState(lacks // 2, math.inf), little)
    assert planned.demoted == lacks // 2
    assert planned.exceeds == pytest.approx(lacks - planned.demoted, rel=0.05)


def test_a_learner_has_state_demoted_and_plans_on_with_what_it_recorded() -> None:
    relief = Gives([], FREE)
    learner = Learner(POLICIES["auto"], LITTLE, must_fit=False, relief=relief)
    assert learner.iteration_over(IterationOutcome(MODEL, 0))
    assert relief.gone == [made(FREE).demoted] and not relief.asked
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


def test_a_learner_whose_state_went_in_part_alone_records_what_is_there() -> None:
    relief = Gives([], FREE, keeps=MiB)
    learner = Learner(POLICIES["auto"], LITTLE, must_fit=False, relief=relief)
    learner.iteration_over(IterationOutcome(MODEL, 0))
    assert relief.gone and not learner.records_next
    learner.iteration_over(IterationOutcome(None, 0))
    assert learner.records_next


def test_what_was_recorded_while_plans_were_made_is_without_that_state_too() -> None:
    recordings, other = Recordings(2), gpt(blocks=2)
    for number, trace in enumerate((MODEL, other)):
        recordings.add(trace, number)
    without = MODEL.without_state(GiB)
    recordings.demoted(GiB, ((MODEL, without),))
    first, second = recordings.traces
    assert first is without and second.others == other.without_state(GiB).others
    recordings.demoted(0, ())
    assert recordings.traces == (first, second)


def test_a_learner_that_follows_another_knows_what_state_was_demoted() -> None:
    relief, cache = Gives([], FREE), Kept()
    first = Learner(POLICIES["auto"], LITTLE, must_fit=False, relief=relief)
    first.iteration_over(IterationOutcome(MODEL, 0))
    second = Learner(POLICIES["auto"], LITTLE * 11 // 10, must_fit=False, relief=relief, plan_cache=cache)
    assert second.follow(first)
    for _ in range(30):
        over(second, MODEL.without_state(sum(relief.gone)) if second.records_next else None)
    (content,) = cache.files.values()
    assert CachedPlans.from_json(content).state == sum(relief.gone)


def test_a_run_that_begins_with_cached_plans_has_as_much_state_demoted() -> None:
    cache, first, second = Kept(), Gives([], FREE), Gives([], FREE)
    for relief in (first, second):
        learner = Learner(POLICIES["auto"], LITTLE, must_fit=False, relief=relief, plan_cache=cache)
        without = (replace(MODEL, others=tuple(each - sum(first.gone) for each in MODEL.others)), MODEL)
        for number in range(20):
            over(learner, without[number == 0] if learner.records_next else None)
        assert cache.files
    assert second.gone == first.gone
