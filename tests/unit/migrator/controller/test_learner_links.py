"""Links that change under a learner, and come back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.learners import (
    FLASHNEURON,
    MODEL,
    TARGET,
    TRACE,
    large,
    large_and_planned,
    learned,
    peak_of,
    planned,
    room,
    unrecorded,
)
from tests.unit.traces import chain
from torch_tiers.allocator.sizes import MiB
from torch_tiers.migrator.controller.learner import PATIENCE, Learner
from torch_tiers.migrator.controller.outcome import IterationOutcome
from torch_tiers.migrator.model.links import PCIE_GEN5, Links
from torch_tiers.migrator.model.plan import Plan
from torch_tiers.migrator.model.timing import IterationTime
from torch_tiers.migrator.model.trace import Trace
from torch_tiers.migrator.planner.low_traffic import crossing

SLOW = replace(PCIE_GEN5, d2h=5e9, h2d=5e9, usual=PCIE_GEN5)
LOADED = {"d2h": 0.9, "h2d": 0.8, "bus": 0.8}  # what copies of others leave of each lane
CROWDED = {"d2h": 1.0, "h2d": 1.0, "bus": 1.0}  # and what others do that need the cores


pytestmark = pytest.mark.usefixtures("loud")


def another(trace: Trace, budget: int, links: Links) -> Plan:
    """A policy with another plan for other links."""
    return replace(FLASHNEURON(trace, budget, links), policy=f"for {links.h2d} B/s")


def test_other_links_are_planned_with_at_once() -> None:
    seen: list[Links] = []

    def policy(trace: Trace, budget: int, links: Links) -> Plan:
        seen.append(links)
        return another(trace, budget, links)

    learner, slow = Learner(policy, TARGET), replace(PCIE_GEN5, h2d=20e9)
    assert not learner.relink(slow)  # there is nothing to plan yet
    learner.iteration_over(IterationOutcome(TRACE, 700 * MiB))
    assert not learner.relink(slow)  # nothing new
    assert learner.relink(PCIE_GEN5)
    assert seen == [slow, PCIE_GEN5]


def test_other_links_do_not_have_plans_made_before_all_is_recorded() -> None:
    learner, slow = Learner(FLASHNEURON, TARGET, recordings=2), replace(PCIE_GEN5, h2d=20e9)
    learner.iteration_over(IterationOutcome(TRACE, 700 * MiB))
    assert not learner.relink(slow)
    assert learner.plans == ()
    assert learner.iteration_over(IterationOutcome(TRACE, 700 * MiB))


def test_other_links_wait_for_what_is_learned_anew() -> None:
    learner, slow = Learner(FLASHNEURON, TARGET), replace(PCIE_GEN5, h2d=20e9)
    for _ in range(PATIENCE):
        learner.iteration_over(IterationOutcome(TRACE, 700 * MiB, whole=False))
    before = learner.plans
    learner.iteration_over(IterationOutcome(None, 700 * MiB))
    assert not learner.relink(slow)
    assert before and learner.plans == before
    assert learner.iteration_over(IterationOutcome(TRACE, 700 * MiB))


def test_links_that_change_while_plans_are_made_take_the_place_of_what_was_asked_for() -> None:
    learner, later = large()
    assert not learner.relink(SLOW)
    later.work()
    assert unrecorded(learner, 0)
    (of_old, of_new) = [future.result() for _, future in later.jobs]
    assert learner.plans == tuple(made.plan for made in of_new)
    assert of_new != of_old


def test_of_plans_that_are_being_made_for_less_than_there_is_by_now_none_stay() -> None:
    learner, later = large_and_planned()
    jobs = len(later.jobs)
    for links in (SLOW, replace(SLOW, h2d=4e9)):
        assert not learner.relink(links)
    assert len(later.jobs) == jobs + 2


def test_what_held_before_others_needed_the_memory_bus_holds_again_after_them() -> None:
    learner, later = large_and_planned()
    before = learner.plans
    assert not learner.relink(SLOW)
    assert learner.plans == before, "others take long, and are adopted when they are there"
    later.work()
    assert unrecorded(learner, 0)
    assert learner.plans != before
    assert not learner.relink(PCIE_GEN5)
    later.work()
    assert unrecorded(learner, 0)
    assert learner.plans[0].is_the_same_as(before[0])


def test_plans_that_would_not_fit_any_more_are_not_taken_up() -> None:
    """The program itself took more memory while others needed the bus."""
    learner = planned()
    before, (predicted,) = learner.plans, learner.predictions
    assert predicted is not None
    learner.relink(SLOW)
    assert any([unrecorded(learner, int(1.3 * predicted.peak["hbm"])) for _ in range(2)])
    learner.relink(PCIE_GEN5)
    (now,) = learner.predictions
    assert now is not None and now.peak["hbm"] < predicted.peak["hbm"]
    assert learner.plans != before


def test_plans_for_a_busy_bus_that_come_when_it_is_free_again_are_not_carried_out() -> None:
    learner, later = large_and_planned()
    before = learner.plans
    learner.relink(SLOW)
    assert not learner.relink(PCIE_GEN5), "they are still carried out"
    later.work()
    assert not unrecorded(learner, 0)
    assert learner.plans == before


def test_plans_that_are_no_others_are_not_begun_with_anew() -> None:
    """Policies that take no notice of others: each time pages were mapped anew, twice, for the very same plan."""
    learner = learned()
    before = learner.plans
    for links in (SLOW, PCIE_GEN5):
        assert not learner.relink(links)
        assert learner.plans == before, "the same groups, too, as the engine knows them"


@pytest.mark.parametrize("part", [1.0, 1.0 - 1 / 64])
def test_a_plan_that_moves_little_stays_while_others_need_the_bus(part: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """5 GB/s became 4.5 GB/s, at the cost of two times some steps in which pages are mapped."""
    learner = planned()
    (before,), (predicted,) = learner.plans, learner.predictions
    assert before.moved_bytes and predicted is not None
    rate = crossing(before, PCIE_GEN5) / predicted.seconds / PCIE_GEN5.both
    monkeypatch.setattr("torch_tiers.migrator.planner.low_traffic.LOW_TRAFFIC", part * rate)
    quiet_enough = part == 1.0
    crowded = PCIE_GEN5.reduced(CROWDED)
    assert learner.relink(crowded) != quiet_enough
    assert (learner.plans == (before,)) == quiet_enough
    assert learner.relink(PCIE_GEN5) != quiet_enough
    assert learner.plans[0].is_the_same_as(before)


def test_lanes_that_were_late_beside_others_are_not_late_after_them() -> None:
    learner = planned()
    (before,) = learner.plans
    learner.relink(PCIE_GEN5.reduced(LOADED))
    (predicted,) = learner.predictions
    assert predicted is not None and predicted.busy["h2d"]
    late, peak = IterationTime(predicted.seconds * 1.1, {"h2d": predicted.seconds / 10}), predicted.peak["hbm"]
    for _ in range(4):
        learner.iteration_over(IterationOutcome(None, peak, iteration_time=late))
    assert not learner.plans[0].is_the_same_as(before)
    learner.relink(PCIE_GEN5)
    assert learner.plans[0].is_the_same_as(before)


def test_what_held_before_a_program_changed_does_not_come_back() -> None:
    learner, slow = Learner(another, TARGET), replace(PCIE_GEN5, h2d=20e9)
    learner.iteration_over(IterationOutcome(TRACE, 700 * MiB))
    before = learner.plans
    assert learner.relink(slow)
    unrecorded(learner, TARGET, mispredicted=True)
    longer = chain([10 * MiB] * 50)
    while learner.records_next:
        learner.iteration_over(IterationOutcome(longer, 700 * MiB))
    learner.relink(PCIE_GEN5)
    assert len(learner.plans) == 2
    assert learner.plans != before


def test_what_was_found_of_the_budget_outlasts_other_links() -> None:
    learner = learned(700 * MiB, another)
    assert unrecorded(learner, 1100 * MiB)
    before = room(learner)
    assert learner.relink(replace(PCIE_GEN5, h2d=20e9))
    assert room(learner) == before


def test_plans_for_tiers_that_hold_less_than_was_taken_for_granted_come_at_once() -> None:
    """Other ranks took their share, or a disk is full: the job need not end, if there is a plan that moves less."""
    auto = planned(share=0.7)
    (before,) = auto.plans
    assert before.stored_bytes > 0
    auto.plan_for_less(before.stored_bytes // 2)
    (plan,) = auto.plans
    assert plan.stored_bytes <= before.stored_bytes // 2
    half = before.stored_bytes // 2
    assert not auto.relink(replace(PCIE_GEN5, below=half, dram=half))  # which these are by now


@pytest.mark.parametrize("policy", ["flashneuron", "vdnn-all", "capuchin", "auto"])
def test_what_holds_least_still_does_whatever_the_links(policy: str) -> None:
    """A program stayed 5% over its budget, and each change of links cut another 4% off it, without end."""
    learner = planned(policy, 0.6, must_fit=False)

    def iterations(count: int) -> None:
        for _ in range(count):
            (predicted,) = learner.predictions
            assert predicted is not None
            over = max(int(1.03 * predicted.peak["hbm"]), int(0.63 * peak_of(MODEL)))
            learner.iteration_over(IterationOutcome(None, over))

    iterations(30)
    (before,), correction = learner.plans, learner._feedback.budget.correction
    for links in 4 * (LOADED, CROWDED, None):
        learner.relink(PCIE_GEN5 if links is None else PCIE_GEN5.reduced(links))
        iterations(10)
    assert learner._feedback.budget.correction == correction
    assert learner.plans[0].is_the_same_as(before), "and so what was before others came is there again"


def test_what_comes_back_is_not_begun_with_anew_where_it_is_carried_out_by_another_name() -> None:
    """For slow lanes another plan, and for busy cores the first one again, as it was made anew."""

    def policy(trace: Trace, budget: int, links: Links) -> Plan:
        made = FLASHNEURON(trace, budget, links)
        return replace(made, policy="slow lanes" if links.h2d < 0.9 * PCIE_GEN5.h2d else "fast lanes")

    learner = learned(policy=policy)
    before = learner.plans
    assert learner.relink(PCIE_GEN5.reduced(LOADED))
    assert learner.relink(PCIE_GEN5.reduced(CROWDED))
    now = learner.plans
    assert now != before and now[0].is_the_same_as(before[0])
    assert not learner.relink(PCIE_GEN5)
    assert learner.plans == now
