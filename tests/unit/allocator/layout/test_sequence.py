"""What a period's log foretells, and when it is worth looking at again."""

from __future__ import annotations

import numpy as np

from torch_tiers.allocator.layout.sequence import (
    EAGER,
    LONGEST_PAUSE,
    TOLERATED,
    LayoutDecision,
    Log,
    Watch,
    predict,
    repeats,
)
from torch_tiers.allocator.native import REQUEST
from torch_tiers.allocator.native.sequence_layout import ELSEWHERE

PAGE = 2 << 20


def log(events: int, *requests: tuple[int, int, int, int], state: int | None = None) -> Log:
    return Log(np.array([(*request, int(k == state)) for k, request in enumerate(requests)], REQUEST), events)


def test_what_died_comes_again_and_has_a_place() -> None:
    predicted = predict(log(4, (1024, 0, 0, 3), (2048, 0, 1, 2)))
    assert predicted is not None
    assert predicted.sizes.tolist() == [1024, 2048]
    assert sorted(predicted.offsets.tolist()) == [0, 2048]
    assert predicted.total == PAGE


def test_what_lives_on_is_expected_and_has_no_place() -> None:
    predicted = predict(log(5, (1024, 0, 0, 3), (512, 0, 1, -1), (2048, 0, 2, 4)))
    assert predicted is not None
    assert predicted.sizes.tolist() == [1024, 512, 2048]
    assert predicted.offsets[1] == ELSEWHERE
    assert predicted.total == PAGE


def test_what_an_optimizer_made_for_good_is_not_expected() -> None:
    predicted = predict(log(5, (1024, 0, 0, 3), (512, 0, 1, -1), (2048, 0, 2, 4), state=1))
    assert predicted is not None
    assert predicted.sizes.tolist() == [1024, 2048]


def test_the_period_before_tells_what_dies_in_the_next() -> None:
    before = log(4, (1024, 0, 0, 2), (512, 0, 1, 5))  # the second died at event 1 of the period after
    last = log(4, (1024, 0, 0, 2), (512, 0, 1, -1))
    predicted = predict(last, before)
    assert predicted is not None
    assert predicted.sizes.tolist() == [1024, 512]
    assert ELSEWHERE not in predicted.offsets


def test_only_the_stream_that_asks_for_the_most_is_laid_out() -> None:
    predicted = predict(log(4, (1024, 7, 0, 2), (512, 9, 1, 3)))
    assert predicted is not None
    assert (predicted.stream, predicted.sizes.tolist()) == (7, [1024])


def test_a_period_in_which_nothing_died_foretells_nothing() -> None:
    assert predict(log(1, (512, 0, 0, -1))) is None
    assert predict(log(0)) is None


def test_a_period_is_as_it_would_have_been_without_the_evaluation_at_its_end() -> None:
    """The batch of the next period is asked for after it, and stays."""
    plain = log(7, (1024, 0, 0, 2), (2048, 0, 1, 3), (512, 0, 4, -1), (256, 0, 5, 9))  # event 6: another period's died
    evaluated = log(
        13,
        (1024, 0, 0, 2),
        (2048, 0, 1, 3),
        (4096, 0, 4, 6),
        (4096, 0, 5, 9),
        (512, 0, 7, -1),
        (64, 0, 8, 10),
        (256, 0, 11, 15),
    )
    cut = evaluated.until(2)
    assert cut.requests.tolist() == plain.requests.tolist()
    assert (cut.events, repeats(cut, plain)) == (7, True)
    assert evaluated.until(7).requests.tolist() == evaluated.requests.tolist()
    assert log(0).until(0).events == 0


def test_the_most_that_is_alive_at_once_is_the_least_that_a_layout_takes() -> None:
    assert log(6, (1024, 0, 0, 2), (2048, 0, 1, 4), (512, 0, 3, -1), (256, 0, 5, 9)).most_alive() == 3072
    assert log(0).most_alive() == 0


def test_periods_repeat_if_their_requests_came_at_the_same_events() -> None:
    first = log(4, (1024, 0, 0, 2), (512, 0, 1, 3))
    assert repeats(first, log(4, (1024, 0, 0, 3), (512, 0, 1, 2)))
    assert not repeats(first, log(4, (1024, 0, 0, 2), (512, 0, 2, 3)))
    assert not repeats(first, log(4, (1024, 0, 0, 2)))


ONE = np.arange(1000)


def other(number: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """The sizes of a period that none else has."""
    return ONE + 1000 * (number + 1)


def test_the_first_period_is_laid_out_and_one_as_predicted_is_not() -> None:
    watch = Watch()
    assert watch.period_over(ONE, 0, repeated=False) is LayoutDecision.RENEW
    assert watch.period_over(ONE, 1, repeated=True) is LayoutDecision.KEEP


def test_a_program_that_has_settled_is_laid_out_again_if_the_layout_was_made_before() -> None:
    watch = Watch()
    watch.period_over(ONE, 0, repeated=False)
    assert watch.period_over(other(1), 500, repeated=False) is LayoutDecision.RENEW
    assert watch.period_over(other(1), 10, repeated=True) is LayoutDecision.RENEW
    assert watch.period_over(other(1), 1, repeated=True) is LayoutDecision.KEEP


def test_a_program_that_is_a_little_new_in_every_period_is_looked_at_ever_more_rarely() -> None:
    watch = Watch()
    looks = [
        period
        for period in range(2000)
        if watch.period_over(other(period), 400, repeated=False) is LayoutDecision.RENEW
    ]
    assert looks[:EAGER] == list(range(EAGER))
    assert max(np.diff(looks)) == LONGEST_PAUSE
    assert len(looks) < 40


def misled() -> Watch:
    """Two periods in a row had little of their layouts."""
    watch = Watch()
    watch.period_over(ONE, 0, repeated=False)
    assert watch.period_over(other(0), 900, repeated=False) is LayoutDecision.RENEW
    assert watch.period_over(other(1), 900, repeated=False) is LayoutDecision.FORGET
    return watch


def test_layouts_of_which_little_came_are_given_up_and_only_what_comes_again_has_another() -> None:
    watch = misled()
    assert all(watch.period_over(other(k), 0, repeated=False) is LayoutDecision.KEEP for k in range(2, 100))
    assert watch.period_over(other(95), 0, repeated=False) is LayoutDecision.RENEW, "of a few periods ago"
    assert watch.period_over(other(95), 0, repeated=True) is LayoutDecision.KEEP


def test_a_period_comes_again_where_nearly_all_of_it_does() -> None:
    nearly = np.concatenate([other(1)[:950], other(2)[950:]])
    assert misled().period_over(nearly, 0, repeated=False) is LayoutDecision.RENEW


def test_kinds_of_periods_that_take_turns_are_laid_out_though_each_is_wholly_another() -> None:
    watch = Watch()
    turns = [(ONE if period % 2 else other(0), 0 if period == 0 else 900) for period in range(6)]
    assert {watch.period_over(*turn, repeated=False) for turn in turns} == {LayoutDecision.RENEW}


def test_a_layout_that_came_right_is_trusted_again() -> None:
    watch = misled()
    for _ in range(3):
        watch.period_over(other(2), 0, repeated=False)
    assert watch.period_over(other(3), 400, repeated=False) is LayoutDecision.RENEW


def test_a_period_that_repeats_the_one_before_is_looked_at_where_more_than_a_few_departed_or_there_is_no_layout() -> (
    None
):
    watch = Watch()
    assert not watch.repeated(0)
    watch.period_over(ONE, 0, repeated=False)
    assert watch.repeated(TOLERATED)
    assert not watch.repeated(TOLERATED + 1)
    watch.refused()
    assert not watch.repeated(0)


def test_a_program_that_settled_is_looked_at_as_in_the_beginning_when_it_is_about_to_change() -> None:
    watch = Watch()
    for period in range(500):
        watch.period_over(other(period), 400, repeated=False)
    watch.period_over(ONE, 0, repeated=True)
    watch.expect_new_plans()
    assert not watch.nothing_mispredicted()
    verdicts = [watch.period_over(other(period), 400, repeated=False) for period in range(EAGER - 1)]
    assert verdicts == [LayoutDecision.RENEW] * len(verdicts)


def test_a_program_that_is_new_in_every_period_is_not_looked_at_more_often_for_other_plans() -> None:
    watch, looks = Watch(), 0
    for period in range(1000):
        if period % 4 == 3:
            watch.expect_new_plans()
        looks += watch.period_over(other(period), 400, repeated=False) is LayoutDecision.RENEW
    assert looks < 30


def test_a_page_is_the_dearer_in_dram_the_more_requests_come_to_lie_there() -> None:
    brief = [(PAGE, 0, 1 + 2 * k, 2 + 2 * k) for k in range(5)]
    predicted = predict(log(20, (PAGE, 0, 0, 19), *brief))
    assert predicted is not None
    least, most = sorted(predicted.costs.tolist())
    assert most == 5 * least > 0


def test_pages_of_the_largest_requests_are_the_cheapest_in_dram() -> None:
    """A matrix product reads its smaller operand more often: 0.2 GiB of hidden states took 500 ms a step."""
    predicted = predict(log(4, (64 * PAGE, 0, 0, 3), (PAGE, 0, 1, 2)))
    assert predicted is not None
    small = int(predicted.offsets[1]) // PAGE
    others = np.delete(predicted.costs, small)
    assert predicted.costs[small] > 32 * others.max()
