"""What a learner records, and the room that it plans for."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.learners import (
    FLASHNEURON,
    MODEL,
    TARGET,
    TRACE,
    learned,
    peak_of,
    planned,
    room,
    run,
    unrecorded,
)
from tests.unit.modelled import gpt
from tests.unit.traces import chain
from torch_tiers.allocator.sizes import MiB
from torch_tiers.migrator.controller.budget import PRESSED, SETTLED
from torch_tiers.migrator.controller.feedback import UNTIMED
from torch_tiers.migrator.controller.learner import PATIENCE, Learner
from torch_tiers.migrator.controller.outcome import IterationOutcome
from torch_tiers.migrator.controller.recordings import ITERATIONS_AFTER_MISPREDICTION, KINDS, Recordings
from torch_tiers.migrator.model.links import PCIE_GEN5, Links
from torch_tiers.migrator.model.plan import NoPlanFits, Plan
from torch_tiers.migrator.model.trace import Trace
from torch_tiers.migrator.policies import POLICIES
from torch_tiers.migrator.simulator import simulate

# --------------------------------------------------------------------------------- what is recorded


def test_the_first_iteration_is_recorded_and_is_enough() -> None:
    assert Learner(FLASHNEURON, TARGET).records_next
    assert not learned().records_next


@pytest.mark.parametrize(
    "outcome",
    [IterationOutcome(TRACE, 10 * MiB, whole=False), IterationOutcome(Trace((), 0), MiB)],
    ids=["comes before the optimizer made its state", "saves nothing"],
)
def test_nothing_is_learned_from_an_iteration_that(outcome: IterationOutcome) -> None:
    learner = Learner(FLASHNEURON, TARGET)
    assert not learner.iteration_over(outcome)
    assert learner.plans == ()
    assert learner.records_next


@pytest.mark.parametrize("begun", [0, 40])
def test_a_program_without_an_optimizer_is_learned_after_some_patience(begun: int) -> None:
    learner = Learner(FLASHNEURON, TARGET, begun=begun)
    changed = [learner.iteration_over(IterationOutcome(TRACE, MiB, whole=False)) for _ in range(PATIENCE)]
    assert changed == [False] * (PATIENCE - 1) + [True]


def test_a_program_without_an_optimizer_settles_too() -> None:
    """Waits are timed until then, for six microseconds each."""
    learner = Learner(FLASHNEURON, 4 * TARGET)
    for iteration in range(PATIENCE + UNTIMED):
        trace = TRACE if iteration < PATIENCE else None
        learner.iteration_over(IterationOutcome(trace, 0, whole=False))
    assert learner.settled and not learner.complete


def test_without_laps_plans_settle_too() -> None:
    """As on the CPU, or where several threads train."""
    learner = learned(0)
    assert not learner.settled
    for _ in range(UNTIMED):
        assert not learner.iteration_over(IterationOutcome(None, TARGET))
    assert learner.settled


def test_what_was_learned_for_want_of_an_optimizer_is_learned_anew_after_its_first_step() -> None:
    learner = Learner(FLASHNEURON, TARGET)
    for _ in range(PATIENCE):  # and as many micro-batches before the first step
        learner.iteration_over(IterationOutcome(TRACE, MiB, whole=False))
    plans = learner.plans
    assert plans
    assert not unrecorded(learner, 10 * MiB)
    assert learner.plans == plans
    assert learner.records_next
    learner.iteration_over(IterationOutcome(TRACE, 10 * MiB))
    assert not learner.records_next
    assert learner.plans != plans


def test_the_unforeseen_starts_recording() -> None:
    learner = learned()
    unrecorded(learner, TARGET, mispredicted=True)
    for _ in range(ITERATIONS_AFTER_MISPREDICTION):
        assert learner.records_next
        learner.iteration_over(IterationOutcome(TRACE, TARGET))
    assert not learner.records_next


# ----------------------------------------------------------------------------------------- the room


def test_a_program_above_the_target_keeps_nothing() -> None:
    assert learned(1200 * MiB).plans[0].kept_bytes == 0


@pytest.mark.parametrize(("peak", "then"), [(900, 350), (1050, 250)], ids=["by half of what is left", "by the excess"])
def test_the_room_is_what_the_learning_iteration_left_and_is_corrected(peak: int, then: int) -> None:
    learner = learned(700 * MiB)
    assert room(learner) == 300 * MiB
    assert unrecorded(learner, peak * MiB)
    assert room(learner) == then * MiB


def test_an_allocator_under_pressure_ends_the_growth() -> None:
    learner = learned(700 * MiB)
    assert learner.iteration_over(IterationOutcome(None, 900 * MiB, pressed=True))
    assert room(learner) == 300 * MiB - int(PRESSED * TARGET)
    assert not unrecorded(learner, 900 * MiB)


def test_a_trace_that_tells_what_else_lies_in_hbm_is_planned_for_the_target() -> None:
    budgets: list[int] = []

    def policy(trace: Trace, budget: int, links: Links) -> Plan:
        budgets.append(budget)
        return FLASHNEURON(trace, budget, links)

    learner = Learner(policy, TARGET)
    trace = replace(TRACE, others=(600 * MiB,) * (TRACE.positions + 1))
    learner.iteration_over(IterationOutcome(trace, 700 * MiB))
    assert [unrecorded(learner, 1100 * MiB) for _ in range(2)] == [False, True]
    assert budgets == [1000 * MiB, 900 * MiB]


def test_near_the_target_the_room_stays() -> None:
    learner = learned(700 * MiB)
    assert not unrecorded(learner, int(TARGET * (1 - SETTLED / 2)))
    assert not unrecorded(learner, int(TARGET * (1 + SETTLED / 2)))


def test_when_nothing_moves_more_room_is_not_asked_for() -> None:
    learner = learned(100 * MiB)
    assert learner.plans[0].groups == ()
    assert not unrecorded(learner, 500 * MiB)


@given(
    sizes=st.lists(st.integers(1, 80).map(lambda n: n * MiB), min_size=1, max_size=30),
    own=st.integers(0, 1000).map(lambda n: n * MiB),
    elsewhere=st.integers(0, 1000).map(lambda n: n * MiB),
)
def test_feedback_settles_within_the_target(sizes: list[int], own: int, elsewhere: int) -> None:
    learner = Learner(FLASHNEURON, TARGET)
    # It takes this long where the peak hides what the room does: half of what is left, which is the same each time.
    changed, peaks = run(learner, [(chain(sizes), own)] * 280, elsewhere)
    assert not any(changed[-20:])
    assert peaks[-1] <= TARGET * (1 + SETTLED) or learner.plans[0].kept_bytes == 0


def test_a_peak_in_which_saved_bytes_have_no_part_settles_with_nothing_kept() -> None:
    learner = Learner(FLASHNEURON, TARGET)
    changed, _ = run(learner, [(TRACE, 100 * MiB)] * 40, elsewhere=2 * TARGET)
    assert learner.plans[0].kept_bytes == 0
    assert not any(changed[20:])


def test_the_room_suits_the_largest_of_alternating_iterations() -> None:
    small, large = chain([10 * MiB] * 40, "small"), chain([10 * MiB] * 40, "large")
    learner = Learner(FLASHNEURON, TARGET)
    changed, peaks = run(learner, [(small, 200 * MiB), (large, 800 * MiB)] * 30)
    assert not any(changed[30:])
    assert max(peaks[30:]) <= TARGET * (1 + SETTLED)


def test_a_policy_that_always_moves_settles_too() -> None:
    learner = Learner(POLICIES["move"], TARGET)
    learner.iteration_over(IterationOutcome(TRACE, 100 * MiB))
    changed = [unrecorded(learner, 100 * MiB) for _ in range(50)]
    assert not any(changed[25:])


# --------------------------------------------------------------------------------- kinds of iterations


@pytest.mark.parametrize("varies", [False, True])
def test_where_iterations_differ_in_size_plans_leave_free_what_best_fit_needs(
    monkeypatch: pytest.MonkeyPatch, *, varies: bool
) -> None:
    """The allocator lays out no memory for them then."""
    monkeypatch.setattr(Recordings, "varies", varies)
    target = int(0.75 * peak_of(MODEL))
    (predicted,) = planned(share=0.75, without_layout=target // 20).predictions
    assert predicted is not None
    assert target * 94 // 100 < predicted.peak["hbm"] <= (target - target // 20 if varies else target)
    assert varies or predicted.peak["hbm"] > target - target // 20


@pytest.mark.parametrize("varies", [False, True])
def test_where_iterations_differ_in_size_none_is_given_what_a_smaller_one_left_free(
    monkeypatch: pytest.MonkeyPatch, *, varies: bool
) -> None:
    """A detector's plan was made anew three times, for batches that were smaller than the one that comes again."""
    monkeypatch.setattr(Recordings, "varies", varies)
    learner, half = planned(share=0.75), peak_of(MODEL) // 2
    assert any([unrecorded(learner, half) for _ in range(4)]) is not varies


def test_alternating_kinds_of_iterations_are_both_planned_for() -> None:
    one, other = chain([10 * MiB] * 4, "g"), chain([20 * MiB] * 4, "d")
    learner = Learner(FLASHNEURON, TARGET)
    run(learner, [(one, 900 * MiB), (other, 900 * MiB)] * 6)
    assert set(learner.traces) == {one, other}
    assert len(learner.plans) == 2
    assert not learner.records_next


def renamed(trace: Trace) -> Trace:
    """The same iteration of another kind."""
    sites = tuple(replace(site, key=f"other.{site.key}") for site in trace.sites)
    return replace(trace, sites=sites)


def two_kinds(policy: str, target: int) -> tuple[list[bool], list[int]]:
    """Short and long iterations that are just as predicted; which changed the plans, and their peaks."""
    kinds = renamed(gpt(blocks=4)), MODEL
    learner = Learner(POLICIES[policy], target, must_fit=False, recordings=2)
    for kind in kinds:
        learner.iteration_over(IterationOutcome(kind, 0))
    changed, peaks = [], []
    for _ in range(20):
        for kind, plan in zip(kinds, learner.plans, strict=True):
            peaks.append(simulate(kind, PCIE_GEN5, plan).peak["hbm"])
            changed.append(unrecorded(learner, peaks[-1]))
    return changed, peaks


@pytest.mark.parametrize("policy", ["auto", "g10", "checkpoint", "superneurons"])
def test_what_a_short_iteration_leaves_free_a_long_one_is_not_given(policy: str) -> None:
    target = int(0.8 * peak_of(MODEL))
    changed, peaks = two_kinds(policy, target)
    assert not any(changed)
    assert max(peaks) <= target


def test_what_the_long_iteration_lacks_is_not_taken_from_the_short_one() -> None:
    with pytest.raises(NoPlanFits) as error:
        POLICIES["auto"](MODEL, 0, PCIE_GEN5)
    changed, _ = two_kinds("auto", int(error.value.smallest / 1.1))
    assert not any(changed)


def test_of_one_kind_the_larger_iteration_is_planned_for() -> None:
    learner = Learner(FLASHNEURON, TARGET)
    large, small = chain([20 * MiB] * 4), chain([10 * MiB] * 4)
    for trace in (small, large, small):
        learner.iteration_over(IterationOutcome(trace, 100 * MiB))
    assert set(learner.traces) == {large}


def test_iterations_of_one_kind_that_are_smaller_ask_for_no_other_plan() -> None:
    """Else a program whose every step has another size, such as a detector, has another plan in every step."""
    learner = Learner(FLASHNEURON, TARGET)
    changed, recorded = [], 0
    for nbytes in (20, 12, 17, 10, 19, 15) * 10:
        trace = chain([nbytes * MiB] * 4) if learner.records_next else None
        recorded += trace is not None
        changed.append(learner.iteration_over(IterationOutcome(trace, 900 * MiB, mispredicted=trace is None)))
    assert sum(changed) == 1
    assert recorded < 30


def test_only_recent_kinds_are_remembered() -> None:
    learner = Learner(FLASHNEURON, TARGET)
    kinds = [chain([MiB], f"kind{k}_") for k in range(KINDS + 3)]
    for trace in kinds:
        learner.iteration_over(IterationOutcome(trace, 100 * MiB))
    assert list(learner.traces) == kinds[3:]
    assert len(learner.plans) == KINDS


def test_sizes_that_change_all_the_time_do_not_change_the_plan_in_every_iteration(seed: int) -> None:
    rng = Random(seed)
    learner = learned(700 * MiB)
    changed = [unrecorded(learner, rng.randrange(500, 1300) * MiB) for _ in range(200)]
    assert sum(changed) < 50


def test_sites_that_change_all_the_time_do_not_change_the_plan_in_every_iteration() -> None:
    learner = Learner(FLASHNEURON, TARGET)
    shapes = [chain([10 * MiB] * 4, f"shape{number}_") for number in range(100)]
    changed, _ = run(learner, [(trace, 900 * MiB) for trace in shapes])
    assert sum(changed) < 100
