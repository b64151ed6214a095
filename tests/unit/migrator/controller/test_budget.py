"""What measured peaks, flushes and overflow correct of the budget."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from torch_tiers.allocator.sizes import MiB
from torch_tiers.migrator.controller.budget import (
    CUTS,
    GROWTHS,
    PRESSED,
    SETTLING,
    SPILLS,
    SURE,
    TELLING,
    WITHOUT,
    Budget,
)
from torch_tiers.migrator.controller.outcome import IterationOutcome

TARGET = 1000 * MiB


def changes(budget: Budget, peak: int = TARGET, **what: Any) -> bool:
    """An iteration under a plan that was predicted to come to the target; for `what` see `IterationOutcome`."""
    outcome = IterationOutcome(None, peak, **what)
    return budget.peak(outcome, TARGET, TARGET, may_grow=True)


def test_a_cache_that_is_flushed_now_and_then_leaves_the_budget_as_it_is() -> None:
    budget = Budget(TARGET)
    now_and_then = [False, True, False, False] * 4
    flushes = [True] * SETTLING + now_and_then + [True] * 3  # with which there are four in eight periods
    assert [changes(budget, pressed=flush) for flush in flushes] == [
        *[False] * (len(flushes) - 1),
        True,
    ]
    assert budget.correction == -int(PRESSED * TARGET)
    budget.adopted()
    assert not any(changes(budget, pressed=True) for _ in range(SETTLING))


def overflows(budget: Budget, nbytes: int, *, before: int = 1) -> bool:
    """Periods under new plans for which HBM lacked so much: `before` memory was laid out for them, and after that."""
    laid_out = [False] * before + [True] * (SPILLS + 1)
    return any([changes(budget, overflow=nbytes, laid_out=each) for each in laid_out])


@pytest.mark.parametrize("before", range(WITHOUT - SPILLS))
def test_what_did_not_fit_into_hbm_comes_off_the_budget_once_memory_is_laid_out(before: int) -> None:
    budget = Budget(TARGET)
    for _ in range(max(1, before)):
        assert not changes(budget, overflow=10 * MiB, laid_out=False)
    assert [changes(budget, overflow=10 * MiB) for _ in range(SPILLS)] == [*[False] * (SPILLS - 1), True]
    assert -40 * MiB < budget.correction < -10 * MiB


def test_what_did_not_fit_once_in_a_while_takes_nothing_off_the_budget() -> None:
    budget = Budget(TARGET)
    for overflow in (9 * MiB, 9 * MiB, 0, 9 * MiB, 0, 9 * MiB, 0):
        assert not changes(budget, overflow=overflow)


def test_a_period_in_which_the_layout_was_given_up_takes_nothing_off_the_budget() -> None:
    """It overflowed by 2 GiB beside one that did by 16 MiB: that much of a budget of 19 lay idle from then on."""
    budget = Budget(TARGET)
    for laid_out, overflow in ((False, 0), (False, MiB), (False, 100 * MiB), *[(True, 0)] * 4):
        assert not changes(budget, overflow=overflow, laid_out=laid_out)


def test_what_never_fits_comes_off_the_budget_of_a_program_for_which_memory_is_never_laid_out() -> None:
    budget = Budget(TARGET)
    changed = [changes(budget, overflow=9 * MiB, laid_out=False) for _ in range(WITHOUT + SPILLS)]
    assert changed == [*[False] * (WITHOUT + SPILLS - 1), True]


def period(budget: Budget, overflow: int, iterations: int, *, stays: bool = False) -> list[bool]:
    """The iterations of a period for which HBM lacked so much; which changed the budget, and so the plan, or not."""
    changed = []
    for number in range(iterations):
        changed.append(changes(budget, overflow=overflow, ends_period=number == 0))
        if changed[-1]:
            (budget.stayed if stays else budget.adopted)()
    return changed


@pytest.mark.parametrize("iterations", [1, 2, 4])
def test_a_period_that_did_not_fit_counts_once_however_many_iterations_it_has(iterations: int) -> None:
    """Where gradients were those of two batches, one step that logged its loss took a tenth of the budget, for good."""
    budget = Budget(TARGET)
    for overflow in (0, 0, 9 * MiB, 0, 9 * MiB, 0, 9 * MiB):
        assert not any(period(budget, overflow, iterations))
    assert any(period(budget, 9 * MiB, iterations)), "but two in a row do"


@pytest.mark.parametrize("stays", [False, True], ids=["another plan", "the same plan"])
@pytest.mark.parametrize("iterations", [1, 2, 8])
def test_a_cut_that_has_not_helped_is_not_repeated_within_a_period_either(iterations: int, *, stays: bool) -> None:
    budget = Budget(TARGET)
    changed = [change for _ in range(12) for change in period(budget, 4 * MiB, iterations, stays=stays)]
    assert sum(changed) == 1


@pytest.mark.parametrize("iterations", [1, 2, 4, 8])
def test_what_never_fits_is_cut_though_the_order_of_requests_changes_now_and_then(iterations: int) -> None:
    budget, changed = Budget(TARGET), False
    for number in range(100):
        if number % 10 == 0:
            budget.rearranged()
        changed |= changes(budget, overflow=9 * MiB, ends_period=number % iterations == 0)
    assert changed


def test_what_does_not_become_less_with_the_budget_is_not_taken_off_it_again() -> None:
    budget = Budget(TARGET)
    changed = 0
    for _ in range(20):
        budget.adopted()
        changed += overflows(budget, 4 * MiB)
    assert changed == 1


def test_before_memory_is_laid_out_for_the_next_plan_nothing_tells_that_a_cut_has_helped() -> None:
    """Without a layout nobody can take pages from one, so such iterations have no overflow."""
    budget = Budget(TARGET)
    changed = 0
    for _ in range(20):
        budget.adopted()
        assert not any(changes(budget, laid_out=False) for _ in range(2))
        changed += overflows(budget, 4 * MiB, before=0)
    assert changed == 1


@pytest.mark.parametrize("fits", [0, SURE], ids=["less and less", "again and again"])
def test_the_budget_is_cut_a_few_times_for_what_other_programs_and_streams_need(fits: int) -> None:
    budget = Budget(TARGET)
    changed = 0
    for turn in range(40):
        overflow = 50 * MiB - turn * 512
        changed += overflows(budget, overflow)
        assert not any(changes(budget) for _ in range(fits))
        budget.adopted()
    assert changed == CUTS
    budget.news()
    assert overflows(budget, MiB)


def test_what_the_iteration_before_a_plan_left_in_hbm_is_not_taken_off_its_budget() -> None:
    """Plans may begin between two batches of a step: 3% of a decoder's budget went, for good."""
    budget = Budget(TARGET)
    for _ in range(5):
        budget.adopted()
        assert not changes(budget, TARGET * 105 // 100)
        assert not any(changes(budget) for _ in range(SETTLING))
    budget.adopted()
    assert [changes(budget, TARGET * 105 // 100) for _ in range(2)] == [False, True]


def test_a_growth_that_goes_too_far_is_taken_back_and_not_tried_again() -> None:
    budget = Budget(TARGET)
    assert [changes(budget, TARGET * 85 // 100) for _ in range(TELLING)][-1]
    assert budget.correction > 0
    budget.adopted()
    assert [changes(budget, TARGET * 115 // 100) for _ in range(2)] == [False, True]
    assert budget.correction == 0
    assert not any(changes(budget, TARGET * 85 // 100) for _ in range(2 * SETTLING))


def test_the_budget_grows_again_where_the_next_plan_leaves_much_free_too_and_then_no_more() -> None:
    """Of what a compiled block saves several tensors lie on one storage that is foreseen once for each."""
    budget = Budget(TARGET)
    corrections = []
    for _ in range(2 * GROWTHS):
        budget.adopted()
        for _ in range(1 + TELLING):
            changes(budget, TARGET * 85 // 100)
        corrections.append(budget.correction)
    grown = [0, *corrections[:GROWTHS]]
    assert all(before < after for before, after in pairwise(grown))
    assert set(corrections[GROWTHS:]) == {grown[-1]}


def test_the_budget_does_not_grow_by_what_a_short_iteration_leaves_free() -> None:
    """Lengths alternate, and the plan for long iterations serves short ones, too."""
    peaks = [TARGET * 70 // 100, TARGET * 99 // 100] * 10
    for begins in (0, 1):
        budget = Budget(TARGET)
        budget.adopted()
        assert not any(changes(budget, peak) for peak in peaks[begins:])


def test_a_flush_while_groups_come_back_in_another_order_is_none_of_the_plan_s() -> None:
    """After a load two more groups came ahead each step, and each step flushed: 3% of the budget went, for good."""
    budget = Budget(TARGET)
    for _ in range(20):
        assert not changes(budget)
    for _ in range(3):
        budget.rearranged()
        for flushes in (True, True, False, False):
            assert not changes(budget, pressed=flushes)
    for _ in range(SURE - 2):
        assert not changes(budget, pressed=True)
    assert changes(budget, pressed=True), "but one that stays is"


def test_a_flush_that_no_smaller_budget_ends_is_not_the_plan_s() -> None:
    """Another job on the same GPU, or fragments that stay: 34 cuts took all of the budget."""
    budget, plans = Budget(TARGET), 0
    for _ in range(300):
        if changes(budget, pressed=True):
            budget.adopted()
            plans += 1
    assert plans == CUTS
    assert budget.correction == -CUTS * int(PRESSED * TARGET)


def test_an_allocator_that_flushes_in_three_periods_of_four_has_too_little_room() -> None:
    """Of kinds of periods that alternate, one may do without."""
    budget = Budget(TARGET)
    cuts = [changes(budget, pressed=k % 4 > 0) for k in range(SETTLING + SURE)]
    assert sum(cuts) == 1
