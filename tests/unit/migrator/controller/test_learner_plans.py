"""When a learner has plans made, which of them hold, and when they stay."""

from __future__ import annotations

import logging
import pickle
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.learners import (
    FLASHNEURON,
    MODEL,
    TARGET,
    TRACE,
    Gives,
    Later,
    large,
    large_and_planned,
    learned,
    peak_of,
    planned,
    run,
    unrecorded,
)
from tests.unit.traces import chain
from torch_tiers.allocator.sizes import MiB
from torch_tiers.migrator.controller.background import in_background
from torch_tiers.migrator.controller.budget import SETTLED, SURE
from torch_tiers.migrator.controller.feedback import UNTIMED
from torch_tiers.migrator.controller.learner import PATIENCE, Learner
from torch_tiers.migrator.controller.outcome import IterationOutcome
from torch_tiers.migrator.controller.plan_requests import AT_ONCE, Job
from torch_tiers.migrator.controller.planned import PlannedIteration
from torch_tiers.migrator.controller.recordings import ITERATIONS_AFTER_MISPREDICTION
from torch_tiers.migrator.model.links import PCIE_GEN5, Links
from torch_tiers.migrator.model.plan import NoPlanFits, Plan
from torch_tiers.migrator.model.timing import IterationTime
from torch_tiers.migrator.model.trace import Trace
from torch_tiers.migrator.policies import POLICIES
from torch_tiers.migrator.simulator import simulate

# ------------------------------------------------------------------------------- beside the program


def test_plans_that_take_long_are_adopted_at_the_end_of_the_iteration_in_which_they_are_there() -> None:
    learner, later = large()
    assert not unrecorded(learner, 0)
    assert (learner.plans, learner.traces) == ((), ())
    assert learner.planning
    later.work()
    assert learner.plans == ()
    assert not learner.planning
    assert unrecorded(learner, 0)
    assert (len(learner.plans), learner.traces) == (1, (MODEL,))


def test_while_plans_are_made_nothing_is_corrected() -> None:
    learner, later = large()
    assert not unrecorded(learner, 2 * peak_of(MODEL))
    assert len(later.jobs) == 1
    later.work()
    assert unrecorded(learner, 2 * peak_of(MODEL))  # still an iteration of the old plans
    assert len(later.jobs) == 1
    for _ in range(2):
        unrecorded(learner, peak_of(MODEL))
    assert len(later.jobs) == 2


def test_what_is_learned_meanwhile_takes_the_place_of_what_was_asked_for() -> None:
    learner, later = large()
    other = replace(MODEL, sites=tuple(replace(site, key=f"other.{site.key}") for site in MODEL.sites))
    learner.iteration_over(IterationOutcome(other, 0))
    later.work()
    assert unrecorded(learner, 0)
    assert learner.traces == (MODEL, other)


def test_at_the_end_plans_are_waited_for() -> None:
    learner = Learner(POLICIES["auto"], peak_of(MODEL), submit=in_background)
    learner.iteration_over(IterationOutcome(MODEL, 0))
    learner.finish()
    assert len(learner.plans) == 1


def test_a_plan_from_another_process_that_is_as_good_as_the_present_one_changes_nothing() -> None:
    def elsewhere(job: Job) -> Future[tuple[PlannedIteration, ...]]:
        done: Future[tuple[PlannedIteration, ...]] = Future()
        done.set_result(pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(job))())))
        return done

    learner = Learner(POLICIES["auto"], peak_of(MODEL) * 3 // 4, submit=elsewhere)
    assert len(MODEL.sites) > AT_ONCE
    assert learner.iteration_over(IterationOutcome(MODEL, 0))
    (plan,), (predicted,) = learner.plans, learner.predictions
    assert predicted is not None and plan.groups
    faster = IterationTime(0.9 * predicted.seconds, {})
    changes = [
        learner.iteration_over(IterationOutcome(None, predicted.peak["hbm"], iteration_time=faster))
        for _ in range(3 * SURE)
    ]
    assert learner.predictions[0] is not None and learner.predictions[0].seconds < 0.95 * predicted.seconds
    assert not any(changes) and learner.plans[0] is plan


def test_a_target_that_no_plan_meets_is_an_error() -> None:
    with pytest.raises(NoPlanFits):
        Learner(POLICIES["auto"], MODEL.others[0] // 2).iteration_over(IterationOutcome(MODEL, 0))


class Failing:
    """A policy that makes plans as long as nothing is wrong with it."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def __call__(self, trace: Trace, budget: int, links: Links) -> Plan:
        if self.error is not None:
            raise self.error
        return FLASHNEURON(trace, budget, links)


@pytest.mark.parametrize("error", (ZeroDivisionError("a bug"), NoPlanFits(1, 2, "others"), TimeoutError("stuck")))
def test_who_fails_to_make_other_plans_leaves_those_that_there_are_and_that_is_said_once(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    policy = Failing()
    learner = learned(policy=policy)
    plans, policy.error = learner.plans, error
    for peak in (2 * TARGET, TARGET // 2):
        assert not unrecorded(learner, peak)
        assert learner.plans == plans and not learner.planning
    (said,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert said.endswith("the plans there are stay")


def test_who_fails_to_make_the_first_plan_leaves_all_to_move(caplog: pytest.LogCaptureFixture) -> None:
    learner = Learner(Failing(ZeroDivisionError("a bug")), TARGET)
    assert not learner.iteration_over(IterationOutcome(TRACE, 0))
    assert not unrecorded(learner, 2 * TARGET)
    assert learner.plans == ()
    (said,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert "a bug" in said and said.endswith("as before the first plan")


def test_plans_that_are_waited_for_in_vain_hold_training_up_no_longer_than_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("torch_tiers.migrator.controller.learner.DEADLINE", 0.1)
    learner, _ = large_and_planned()
    plans = learner.plans
    learner.plan_for_less(MiB)
    assert learner.plans == plans and not learner.planning
    assert "no plan could be made within 0.1 s; the plans there are stay" in caplog.text


def too_small(**arguments: Any) -> Learner:
    """A learner whose target no plan meets, which is met as far as can be."""
    learner = Learner(POLICIES["auto"], max(MODEL.others) // 2, must_fit=False, **arguments)
    assert learner.iteration_over(IterationOutcome(MODEL, 0)) and learner.plans
    return learner


def test_what_does_not_fit_is_said_once_by_threads_that_come_and_go_with_the_budget_it_is_a_part_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    warned: set[str] = set()
    for _ in range(3):
        too_small(warned=warned, budget=100 * MiB).iteration_over(IterationOutcome(MODEL, 0))
    (said,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert "no plan keeps this program within 100.0 MiB" in said


def test_where_no_plan_fits_room_is_asked_for_and_what_is_recorded_with_it_is_planned(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The iteration that is over may have begun before there was that room: the one after it is the first with it."""
    asked: list[int] = []
    learner = too_small(relief=Gives(asked))
    (lacks,) = asked
    assert lacks > 0
    assert not learner.records_next and not caplog.records
    learner.iteration_over(IterationOutcome(None, 0))
    assert learner.records_next
    smaller = replace(MODEL, others=tuple(max(0, each - lacks - MiB) for each in MODEL.others))
    learner.iteration_over(IterationOutcome(smaller, 0))
    assert asked == [lacks] and not caplog.records


def test_plans_that_do_not_fit_with_the_room_that_was_made_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    asked: list[int] = []
    learner = too_small(relief=Gives(asked))
    for trace in (None, MODEL, None, None):
        learner.iteration_over(IterationOutcome(trace, 0))
    assert len(asked) == 1 and not learner.records_next
    assert "no plan keeps this program" in caplog.text


def test_feedback_never_asks_for_less_than_there_is_a_plan_for() -> None:
    with pytest.raises(NoPlanFits) as error:
        POLICIES["auto"](MODEL, 0, PCIE_GEN5)
    learner = Learner(POLICIES["auto"], error.value.smallest + 100 * MiB)
    learner.iteration_over(IterationOutcome(MODEL, 0))
    assert [unrecorded(learner, 2 * error.value.smallest) for _ in range(2)] == [False, True]
    (predicted,) = learner.predictions
    assert predicted is not None
    assert predicted.peak["hbm"] <= error.value.smallest
    changed = [unrecorded(learner, 2 * error.value.smallest) for _ in range(5)]
    assert not any(changed[2:])


# ----------------------------------------------------------------------- prediction and measurement


@settings(max_examples=15)
@given(
    share=st.floats(0.6, 0.95),
    error=st.floats(-0.15, 0.15),
    slower=st.floats(0.5, 1.0),
)
def test_corrections_settle_within_ten_iterations(share: float, error: float, slower: float) -> None:
    """A program whose peak differs from what is predicted by a share of the target, on links slower than thought."""
    target = int(share * peak_of(MODEL))
    links = replace(PCIE_GEN5, d2h=slower * PCIE_GEN5.d2h, h2d=slower * PCIE_GEN5.h2d)
    learner = Learner(POLICIES["auto"], target)
    learner.iteration_over(IterationOutcome(MODEL, 0))
    changed, peak = [], 0
    for _ in range(25):
        real = simulate(MODEL, links, learner.plans[0])
        peak = real.peak["hbm"] + int(error * target)
        changed.append(
            learner.iteration_over(
                IterationOutcome(None, peak, iteration_time=IterationTime(real.seconds, real.stalls))
            )
        )
    assert not any(changed[10:])
    assert peak <= target * (1 + SETTLED)


def test_several_iterations_are_recorded_before_the_first_plan_where_that_is_asked_for() -> None:
    learner = Learner(POLICIES["flashneuron"], TARGET, recordings=3)
    for _ in range(2):
        assert not learner.iteration_over(IterationOutcome(chain([MiB] * 4), 0))
        assert learner.records_next
        assert not learner.plans
    assert learner.iteration_over(IterationOutcome(chain([MiB] * 4), 0))
    assert learner.plans
    assert not learner.records_next


def test_what_is_learned_anew_is_planned_for_when_all_is_recorded_again() -> None:
    learner = Learner(POLICIES["auto"], peak_of(MODEL), recordings=3)
    for _ in range(PATIENCE + 2):
        learner.iteration_over(IterationOutcome(MODEL, 0, whole=False))
    before = learner.plans
    changed = []
    unrecorded(learner, 0)
    for _ in range(3):
        changed.append(learner.iteration_over(IterationOutcome(MODEL, 0)))
    assert before and learner.plans
    assert changed == [False, False, True]


# ---------------------------------------------------------------------------------- plans that stay


def bear_out(learner: Learner, iterations: int) -> list[bool]:
    """Iterations that take what was predicted; whether the plans had settled after each."""
    (predicted,) = learner.predictions
    assert predicted is not None
    settled = []
    for _ in range(iterations):
        iteration_time, peak = IterationTime(predicted.seconds, predicted.stalls), predicted.peak["hbm"]
        assert not learner.iteration_over(IterationOutcome(None, peak, iteration_time=iteration_time))
        settled.append(learner.settled)
    return settled


def test_plans_have_settled_once_laps_bore_them_out() -> None:
    learner = planned()
    assert learner.complete and not learner.settled
    settled = bear_out(learner, 12)
    assert settled == sorted(settled) and settled.index(True) >= SURE


def test_plans_have_not_settled_while_something_is_recorded_planned_or_corrected() -> None:
    learner, later = large()
    assert not learner.settled
    later.work()
    unrecorded(learner, 0)
    (predicted,) = learner.predictions
    assert predicted is not None
    assert bear_out(learner, 12)[-1]
    unrecorded(learner, predicted.peak["hbm"], mispredicted=True)
    assert learner.records_next and not learner.settled
    while learner.records_next:
        learner.iteration_over(IterationOutcome(MODEL, 0))
    assert learner.settled
    unrecorded(learner, 2 * peak_of(MODEL))
    assert learner.planning and not learner.settled
    later.work()
    unrecorded(learner, 0)
    assert learner.complete and not learner.settled, "the new plans are not borne out yet"


def test_where_no_times_are_to_be_had_plans_settle_all_the_same() -> None:
    one, other = chain([10 * MiB] * 4, "g"), chain([20 * MiB] * 4, "d")
    several = Learner(FLASHNEURON, TARGET)
    run(several, [(one, 900 * MiB), (other, 900 * MiB)] * 4)
    for learner, peak in ((learned(100 * MiB), TARGET), (several, TARGET), (too_small(), 2 * peak_of(MODEL))):
        for _ in range(3 * UNTIMED):
            unrecorded(learner, peak)
        assert learner.settled


# ---------------------------------------------------------------------------- what cannot be helped


def test_while_the_first_plan_is_made_nothing_mispredicts() -> None:
    learner, later = large()
    assert not learner.iteration_over(IterationOutcome(None, 0, mispredicted=True))
    assert not learner.records_next
    later.work()
    assert learner.iteration_over(IterationOutcome(None, 0, mispredicted=True))
    assert not learner.records_next


def test_what_no_trace_tells_of_is_looked_for_but_rarely() -> None:
    learner = learned(500 * MiB)
    plans, recorded = learner.plans, 0
    for _ in range(150):
        trace = TRACE if learner.records_next else None
        recorded += trace is not None
        learner.iteration_over(IterationOutcome(trace, TARGET, mispredicted=True))
    assert recorded <= 2 * ITERATIONS_AFTER_MISPREDICTION
    assert learner.plans == plans


def test_where_no_plan_holds_less_nothing_is_asked_for_in_vain() -> None:
    """What exceeds the target has another place to be: it would be asked for less and less, in every iteration."""
    learner = too_small()
    (plan,) = learner.plans
    assert not any(unrecorded(learner, 2 * peak_of(MODEL)) for _ in range(20))
    assert learner.plans == (plan,)


@pytest.mark.parametrize("name", sorted(set(POLICIES) - {"autotm"}))  # which needs scipy
def test_a_policy_that_refuses_nothing_is_asked_for_less_in_vain_only_once(name: str) -> None:
    """What a published policy finds may not fit. However little is lacking, that is so after ten iterations."""
    with suppress(NoPlanFits):
        least = simulate(MODEL, PCIE_GEN5, POLICIES[name](MODEL, 0, PCIE_GEN5)).peak["hbm"]
        learner = Learner(POLICIES[name], int(least / 1.03), must_fit=False)
        learner.iteration_over(IterationOutcome(MODEL, 0))
        changed = [unrecorded(learner, simulate(MODEL, PCIE_GEN5, learner.plans[0]).peak["hbm"]) for _ in range(30)]
        assert not any(changed[10:])


def test_a_plan_that_comes_out_the_same_is_not_begun_anew() -> None:
    """A ResNet at half of its memory, where nothing moves: the device was faster than recorded."""
    learner = planned("checkpoint")  # which goes by shares of time, so that the pace is all one
    (plan,), (before,) = learner.plans, learner.predictions
    assert before is not None
    iteration_time = IterationTime(0.9 * before.seconds, before.stalls)
    for _ in range(2 * UNTIMED):
        outcome = IterationOutcome(None, peak_of(MODEL) * 3 // 4, iteration_time=iteration_time)
        assert not learner.iteration_over(outcome), "nothing changed for whoever carries it out"
    (after,) = learner.predictions
    assert learner.plans == (plan,) and learner.settled
    assert after is not None and after.seconds < 0.95 * before.seconds


@pytest.mark.parametrize("resized", [False, True])
@pytest.mark.parametrize("fast", [False, True])
def test_a_plan_that_was_measured_to_take_less_than_another_is_to_stays(fast: bool, resized: bool) -> None:
    """A T5 whose plan took 168 ms, once the host was its own, got another that was predicted to take 203.

    What iterations of another size take says nothing of that.
    """
    rooms, later = [0.7, 1.0, 1.0], Later()

    def better_and_better(trace: Trace, budget: int, links: Links) -> Plan:
        return POLICIES["auto"](trace, int(rooms.pop(0) * budget), links)

    learner = Learner(better_and_better, target := peak_of(MODEL) * 3 // 4, submit=later)
    learner.iteration_over(IterationOutcome(MODEL, 0))
    later.work()
    unrecorded(learner, 0)
    (plan,), (before,) = learner.plans, learner.predictions
    assert before is not None

    def iteration(seconds: float) -> None:
        taken = IterationTime(seconds, before.stalls)
        given = {"mispredicted": False, "iteration_time": taken, "resized": resized}
        learner.iteration_over(IterationOutcome(None, target, **given))

    while not learner.planning:
        iteration(0.9 * before.seconds)
    for _ in range(SURE):
        iteration((0.5 if fast else 0.9) * before.seconds)
    later.work()
    iteration(0.9 * before.seconds)
    assert (learner.plans == (plan,)) == (fast and not resized)


def test_what_was_recorded_anew_is_carried_out_anew_though_the_plan_is_the_same() -> None:
    """More may be known by now to be recomputed with the same bits."""
    learner = Learner(POLICIES["keep"], 2 * peak_of(MODEL))
    learner.iteration_over(IterationOutcome(replace(MODEL, recipes={}), 0))
    (plan,) = learner.plans
    while not learner.records_next:
        unrecorded(learner, 0, mispredicted=True)
    changed = False
    while learner.records_next:
        changed |= learner.iteration_over(IterationOutcome(MODEL, 0))
    assert changed and learner.plans == (plan,)


def test_a_plan_is_told_with_its_numbers(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="tiers"):
        planned()
    (line,) = (record.getMessage() for record in caplog.records)
    assert line.startswith("iteration 1, plan by auto: ") and "of ideal" in line
