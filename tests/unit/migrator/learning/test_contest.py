"""Which of two plans is faster is told by what periods under each take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest

from tests.unit.modelled import gpt
from tests.unit.rivals import (
    BEFORE,
    BUDGET,
    HOLDER,
    LATE,
    PERIODS,
    RIVAL,
    ROUND,
    TRACE,
    made,
    policy,
)
from torch_tiers.allocator.sizes import MiB
from torch_tiers.migrator.learning.background import FromProcess
from torch_tiers.migrator.learning.contest import (
    ALIKE,
    BEST,
    LAPS,
    MARGIN,
    MOST,
    PATIENCE,
    SPARE,
    STEADY,
    Contest,
    Round,
    beats,
    beats_between,
    is_close,
    make_rival,
    may_be,
    periods_of,
)
from torch_tiers.migrator.learning.feedback import SETTLING
from torch_tiers.migrator.learning.made import Made
from torch_tiers.migrator.links import HARDLY, MEASURED, PCIE_GEN5, Costs, Links
from torch_tiers.migrator.plan import Plan
from torch_tiers.migrator.planner.build import make_plan
from torch_tiers.migrator.policies import POLICIES, weighs_costs
from torch_tiers.migrator.simulator import simulate
from torch_tiers.migrator.timing import Lap
from torch_tiers.migrator.trace import Trace


def test_the_faster_of_two_is_told_by_the_shortest_laps_of_each() -> None:
    slow_host = [1.9, 1.7, 2.0, 1.8, 1.6, 1.5]
    assert beats([0.99, 0.991, 0.992, *slow_host], [1.0, 1.001, 1.002, *slow_host])
    assert not beats([1.0, 1.001, 1.002, *slow_host], [0.99, 0.991, 0.992, *slow_host])


def test_where_noise_goes_both_ways_medians_tell_the_faster_of_two() -> None:
    """A lap that is shorter than it should be decides nothing, nor two."""
    laps = [0.995, 0.996, 0.998, 0.999, 1.0, 1.001, 1.002, 1.004, 1.005]
    lucky = [0.98, 0.981, *laps[2:]]
    assert not beats(lucky, laps, laps)
    assert beats([0.995 * lap for lap in laps], laps, laps)
    assert not beats([0.995 * lap for lap in laps], laps, [0.995 * lap for lap in laps])


@pytest.mark.parametrize("seed", range(3))
def test_at_a_power_limit_few_contests_are_decided_wrongly(seed: int) -> None:
    """There a step takes 0.7% more or less, as those of a GPT on an H100 do."""
    random = np.random.default_rng(seed)

    def won(share: float) -> float:
        rounds = random.normal(1, 0.007, (500, 3, LAPS)) * [[[share], [1], [1]]]
        return sum(beats(*three) for three in rounds.tolist()) / 500

    assert won(1.005) < 0.04
    assert won(0.99) > 0.9


def test_all_rounds_are_held_against_one_another_by_the_same_measure() -> None:
    """One whose laps differ has only its shortest ones to tell, and so have those that it is compared with then."""
    busy_host = [0.99, 0.991, 0.992, 1.5, 1.6, 1.7, 1.8, 1.9, 2.0]
    steady = [0.994, 0.995, 0.996, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert periods_of(busy_host, steady) == [0.991, 0.995]
    assert periods_of(steady, steady) == [1.0, 1.0]
    assert periods_of(steady[:2], steady) is None
    assert periods_of(steady[:3], steady) == [0.995, 0.995]


MOVES = [273.4, 272.7, 286.2, 286.8, 272.6, 295.1, 275.8, 285.2, 283.6]
"""Laps of a GPT on an H100 under a plan that moves 3.6 GiB, in milliseconds."""

RECOMPUTES = [276.4, 276.9, 278.7, 277.6, 279.3, 275.3, 278.9, 279.0, 277.3]
"""The same under one that moves nothing, on the same machine."""


def test_a_rival_whose_laps_differ_where_the_holders_do_not_makes_them_so_itself() -> None:
    """Its shortest laps are the shortest of all, and yet it is slower; faster by 3% it wins."""
    assert periods_of(MOVES, RECOMPUTES) == [272.7, 276.4]
    assert not beats(MOVES, RECOMPUTES, RECOMPUTES)
    assert beats([0.97 * lap for lap in MOVES], RECOMPUTES, RECOMPUTES)
    busy_host = [*RECOMPUTES[:3], *[1.5 * lap for lap in RECOMPUTES[3:]]]
    assert beats(MOVES, busy_host, busy_host), "there its shortest laps are all that tells"


@pytest.mark.parametrize("best", [[0.90, 0.95, 0.97, 0.98, 0.99], [0.90, 0.92, 0.94, 0.96, 0.97]])
def test_nor_does_its_median_win_where_even_its_shortest_laps_differ(best: list[float]) -> None:
    assert not beats([*best, 1.08, 1.1, 1.2, 1.3], [1.0] * LAPS, [1.0] * LAPS)


def test_a_rival_that_was_close_does_not_win_as_the_host_gets_busy_after_it() -> None:
    """By the shortest laps of all four rounds it would."""
    before = [1.0] * LAPS, [1.004] * LAPS
    rival = [0.999, 1.0, 1.001, 1.002, 1.0035, 1.004, 1.005, 1.006, 1.007]
    steady = [1.0065] * LAPS
    busy = [1.0055, 1.006, 1.0065, 1.01, 1.02, 1.03, 1.04, 1.05, 1.06]
    assert is_close(rival, before)
    assert beats_between(rival, before, [lap + 0.002 for lap in steady])
    assert not beats_between(rival, before, busy)


def test_a_rival_wins_by_more_than_a_margin_only() -> None:
    assert not beats([1 - 0.9 * MARGIN] * LAPS, [1.0] * LAPS)
    assert beats([1 - 1.1 * MARGIN] * LAPS, [1.0] * LAPS)


def test_where_the_best_laps_differ_nobody_wins() -> None:
    one_short = [0.9, 0.9 * (1 + 1.1 * ALIKE), *[1.0 + k * STEADY for k in range(LAPS - 2)]]
    assert not beats(one_short, [1.0] * LAPS)
    assert not beats([0.5] * LAPS, one_short)
    assert not beats(one_short, [1.2, 1.2, 1.2, *[1.3 + k * STEADY for k in range(LAPS - 3)]])


def test_too_few_laps_tell_nothing() -> None:
    assert not beats([0.5] * (BEST - 1), [1.0] * LAPS)


def test_laps_right_after_a_change_of_plans_do_not_count() -> None:
    laps = Round()
    for seconds in [1.0, None, 1.0, 1.0, None, *[2.0] * (LAPS - 1)]:
        laps.period_over(None if seconds is None else Lap(seconds, {}))
    assert SETTLING == 3
    assert list(laps.seconds) == [2.0] * (LAPS - 1)
    assert not laps.is_over
    laps.period_over(Lap(3.0, {}))
    assert laps.is_over
    laps.disturbed()
    assert not laps.seconds


def periods_of_round(laps: Sequence[float | None]) -> int:
    """After how many a round is over."""
    now = Round()
    for k, seconds in enumerate(laps, 1):
        now.period_over(None if seconds is None else Lap(seconds, {}))
        if now.is_over:
            return k
    raise AssertionError("it is not")


def test_a_round_lasts_until_laps_are_alike() -> None:
    """A card at its power limit rings after a change of plans: the laps of a GPT on an H100, in milliseconds."""
    ringing = [268, 267, 291, 269, 270, 281, 276, 267, 273, 279, 272, 271]
    assert periods_of_round([*ringing, *[273] * MOST]) == len(ringing) + 1
    assert periods_of_round([273] * MOST) == SETTLING + LAPS


def test_a_round_of_laps_that_never_are_alike_is_over_all_the_same() -> None:
    assert periods_of_round([1.0, 1.1, 1.2] * MOST) == SETTLING + MOST
    assert periods_of_round([1.0, None, 1.1, None, 1.2, None] * MOST) == PATIENCE


def test_a_flush_while_groups_come_back_in_another_order_costs_a_rival_nothing() -> None:
    """Others needed the bus in its fourth period: one flush, and a rival 5% faster was never tried again."""
    rival = Future[tuple[Made, ...]]()
    contest = Contest(MEASURED, lambda costs: rival)
    now = HOLDER
    rival.set_result((RIVAL,))
    periods = 0
    while not contest.racing and (periods := periods + 1) < 10 * ROUND:
        now = contest.period_over(now, Lap(1.0, {})) or now
    assert contest.racing
    for _ in range(SETTLING + 1):
        assert contest.period_over(now, Lap(0.95, {})) is None
    contest.rearranged()
    for pressed in (True, False):
        assert contest.period_over(now, Lap(0.95, {}), pressed=pressed) is None
    winner = None
    while winner is None:
        winner = contest.period_over(now, Lap(0.95, {}))
    assert winner is now and contest.is_over


def rival_to(holder: Made, made_by: Callable[[Trace, int, Links], Plan] = policy, budget: int = BUDGET) -> list[Plan]:
    links = replace(PCIE_GEN5, costs=HARDLY)
    return [rival.plan for rival in make_rival(made_by, TRACE, budget, 0, links, holder)]


def test_a_rival_is_worth_it_that_does_something_else_and_would_be_faster_with_its_costs() -> None:
    (plan,) = rival_to(HOLDER)
    assert plan.moved_bytes and not plan.recompute


def test_a_rival_leaves_room_for_what_its_prediction_lacks() -> None:
    """One made for all of the budget did not fit, and is not corrected as plans are that stay."""
    (rival,) = make_rival(policy, TRACE, 2 * BUDGET, -MiB, replace(PCIE_GEN5, costs=HARDLY), HOLDER)
    assert rival.asked == 2 * BUDGET - MiB - int(SPARE * 2 * BUDGET)


def test_a_rival_that_does_the_same_is_none() -> None:
    assert not rival_to(RIVAL)


def test_a_rival_that_is_hardly_faster_even_with_its_costs_is_none() -> None:
    cheap = {ident: replace(recipe, seconds=recipe.seconds / 3) for ident, recipe in TRACE.recipes.items()}
    trace = replace(TRACE, recipes=cheap)
    holder = replace(HOLDER, predicted=simulate(trace, PCIE_GEN5, HOLDER.plan))
    assert not make_rival(policy, trace, BUDGET, 0, replace(PCIE_GEN5, costs=HARDLY), holder)


def test_a_rival_that_does_not_fit_is_none() -> None:
    def keeps_more(trace: Trace, budget: int, links: Links) -> Plan:
        return make_plan("test", trace, {1}, budget)

    assert rival_to(HOLDER, keeps_more)
    assert not rival_to(HOLDER, keeps_more, HOLDER.peak())


def test_a_rival_that_moves_more_than_the_tiers_below_hold_is_none() -> None:
    links = replace(PCIE_GEN5, costs=HARDLY, below=RIVAL.plan.parcel_bytes - 1)
    assert not make_rival(policy, TRACE, BUDGET, 0, links, HOLDER)


def test_where_laps_cannot_tell_or_nothing_can_be_better_there_is_no_contest() -> None:
    assert may_be([HOLDER], PCIE_GEN5)
    assert not may_be([HOLDER], replace(PCIE_GEN5, usual=PCIE_GEN5))
    assert not may_be([HOLDER, HOLDER], PCIE_GEN5)
    assert not may_be([], PCIE_GEN5)
    assert not may_be([replace(HOLDER, predicted=None)], PCIE_GEN5)
    assert not may_be([made(make_plan("test", TRACE, (), BUDGET))], PCIE_GEN5)


def answers(*rivals: Made) -> Callable[[Costs], Future[tuple[Made, ...]]]:
    def ask(costs: Costs) -> Future[tuple[Made, ...]]:
        future: Future[tuple[Made, ...]] = Future()
        future.set_result(rivals)
        return future

    return ask


def raced() -> Contest:
    """A contest in which the rival is carried out from now on."""
    contest = Contest(MEASURED, answers(RIVAL))
    decided = [contest.period_over(HOLDER, Lap(1.0, {})) for _ in range(BEFORE - LATE)]
    assert decided == [None] * (BEFORE - LATE - 1) + [RIVAL]
    assert contest.racing and not contest.is_over
    return contest


@pytest.mark.parametrize(("seconds", "winner", "costs"), [(0.99, RIVAL, HARDLY), (1.01, HOLDER, MEASURED)])
def test_the_winner_stays_and_so_do_its_costs(seconds: float, winner: Made, costs: Costs) -> None:
    contest = raced()
    decided = [contest.period_over(RIVAL, Lap(seconds, {})) for _ in range(ROUND)]
    assert decided == [None] * (ROUND - 1) + [winner]
    assert contest.costs == costs
    assert contest.is_over


def laps(contest: Contest, made: Made, seconds: float | None, periods: int = ROUND) -> list[Made | None]:
    """What is decided in so many periods."""
    return [contest.period_over(made, None if seconds is None else Lap(seconds, {})) for _ in range(periods)]


def close(first: float, second: float, rival: float) -> Contest:
    """A contest whose rounds took so long, with the holder carried out again: the rival lost, but not by much."""
    contest = Contest(MEASURED, answers(RIVAL))
    laps(contest, HOLDER, first, ROUND + 1)
    assert laps(contest, HOLDER, second)[-1] is RIVAL
    assert laps(contest, RIVAL, rival)[-1] is HOLDER
    assert not contest.racing
    return contest


@pytest.mark.parametrize(
    ("rival", "after", "wins"),
    [
        (1.005, 1.012, True),  # 1.008 is what the holder took meanwhile
        (1.007, 1.012, False),  # as fast, but for the margin
        (1.005, 1.0155, False),  # it was something else that made the holder slower by so much
        (1.003, 1.003, False),  # or faster
    ],
)
def test_a_rival_that_a_card_getting_warm_made_slower_is_held_against_the_rounds_around_its_own(
    rival: float, after: float, wins: bool
) -> None:
    """It comes last, and by then a card is slower by more than two plans differ: the first plan always stayed."""
    contest = close(1.0, 1.005, rival)
    assert not contest.is_over
    assert laps(contest, HOLDER, after) == [None] * (ROUND - 1) + [RIVAL if wins else None]
    assert contest.is_over and not contest.racing
    assert contest.costs == (HARDLY if wins else MEASURED)
    assert not any(laps(contest, HOLDER, 0.1, PERIODS)), "and that is that"


@pytest.mark.parametrize(
    ("first", "second", "rival"),
    [
        (1.0, 1.001, 1.0),  # the card does not slow down
        (1.0, 2.0, 1.9),  # the host is fast and slow by turns
        (1.0, 2.0, 2.01),
        (1.0, 1.005, 1.009),  # by more than can be the card's doing
    ],
)
def test_a_rival_that_did_not_lose_by_the_card_has_lost(first: float, second: float, rival: float) -> None:
    contest = close(first, second, rival)
    assert contest.is_over
    assert not any(laps(contest, HOLDER, second, PERIODS))


@pytest.mark.parametrize("what", ["no laps", "another plan", "broken off", "another order", "a drift"])
def test_what_comes_between_in_the_last_round_ends_it_and_the_holder_stays(what: str) -> None:
    contest = close(1.0, 1.005, 1.005)
    if what == "no laps":
        assert not any(laps(contest, HOLDER, None, PATIENCE))
    elif what == "another plan":
        contest.adopted()
    elif what == "broken off":
        assert contest.withdraw() is None, "it is carried out already"
    elif what == "another order":
        contest.rearranged()
    else:
        assert contest.period_over(HOLDER, None, drifted=True) is None
    assert contest.is_over and contest.costs == MEASURED
    assert not any(laps(contest, HOLDER, 1.012, PERIODS))


def test_a_rival_of_which_nobody_knows_what_it_takes_goes() -> None:
    contest = raced()
    assert [contest.period_over(RIVAL, None) for _ in range(PATIENCE)] == [None] * (PATIENCE - 1) + [HOLDER]


def test_a_rival_that_has_too_little_hbm_once_it_settled_goes_at_once() -> None:
    contest = raced()
    for _ in range(SETTLING):
        assert contest.period_over(RIVAL, Lap(0.5, {}), pressed=True) is None
    assert contest.period_over(RIVAL, Lap(0.5, {}), pressed=True) is HOLDER


@pytest.mark.parametrize("over", ["another holder", "too late"])
def test_who_makes_a_rival_that_nobody_waits_for_is_told_to_end(over: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_tiers.migrator.learning.contest.MAKING", 3)
    rival = FromProcess[tuple[Made, ...]]()
    contest = Contest(MEASURED, lambda costs: rival)
    while not contest.planning:
        contest.period_over(HOLDER, Lap(1.0, {}))
    assert not rival.given_up
    if over == "another holder":
        contest.adopted()
    for _ in range(3):
        contest.period_over(HOLDER, Lap(1.0, {}))
    assert rival.given_up
    assert not contest.planning


def test_a_rival_that_cannot_be_made_ends_no_program() -> None:
    def ask(costs: Costs) -> Future[tuple[Made, ...]]:
        future: Future[tuple[Made, ...]] = Future()
        future.set_exception(MemoryError())
        return future

    contest = Contest(MEASURED, ask)
    assert not any(contest.period_over(HOLDER, Lap(1.0, {})) for _ in range(PERIODS))
    assert contest.is_over


def test_only_auto_weighs_what_moving_costs() -> None:
    assert [name for name in POLICIES if weighs_costs(name)] == ["auto"]
    trace = gpt(blocks=8)
    budget = 3 * simulate(trace, PCIE_GEN5, make_plan("keep", trace, (), 1 << 40)).peak["hbm"] // 4
    plans = [POLICIES["auto"](trace, budget, replace(PCIE_GEN5, costs=costs)) for costs in (MEASURED, HARDLY)]
    assert plans[0].moved_bytes < plans[1].moved_bytes


@pytest.mark.parametrize("rival", [1.0, 1.02, 1.3, 1.9])
def test_on_a_host_that_is_fast_and_slow_by_turns_the_rival_does_not_win(rival: float) -> None:
    """Held against the rounds around its own it would: both are slow."""
    contest = Contest(MEASURED, answers(RIVAL))
    laps(contest, HOLDER, 1.0, ROUND + 1)
    assert laps(contest, HOLDER, 2.0)[-1] is RIVAL
    assert laps(contest, RIVAL, rival)[-1] is HOLDER
    assert not any(laps(contest, HOLDER, 2.0, PERIODS))
