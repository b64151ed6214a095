"""State is demoted while something else lies in DRAM, and promoted when there is room to spare."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torch_tiers.allocator.layout.demotion import Resident, demote_or_promote, evenly

HBM = [Resident(1, 100, 0), Resident(2, 300, 0), Resident(3, 200, 0)]
DEMOTED = [Resident(1, 100, 100), Resident(2, 300, 300), Resident(3, 200, 0)]


def test_the_largest_are_demoted_until_nothing_else_needs_dram() -> None:
    assert demote_or_promote(HBM, short=450, spare=0, budget=1000) == ([2, 3], [])
    assert demote_or_promote(HBM, short=300, spare=0, budget=1000) == ([2], [])


def test_of_state_that_makes_room_enough_the_smallest_is_demoted() -> None:
    """One page that others took is no reason to read gigabytes of an embedding's state over the link."""
    assert demote_or_promote(HBM, short=1, spare=0, budget=1000) == ([1], [])
    assert demote_or_promote(HBM, short=350, spare=0, budget=1000) == ([2, 1], [])
    partly = Resident(4, 900, 850)
    assert demote_or_promote([*HBM, partly], short=60, spare=0, budget=1000) == ([1], [])


def test_all_are_demoted_where_even_that_is_not_enough() -> None:
    assert demote_or_promote(HBM, short=5000, spare=0, budget=1000) == ([2, 3, 1], [])


def test_nothing_moves_while_only_state_lies_in_dram_and_hbm_is_full() -> None:
    assert demote_or_promote(DEMOTED, short=0, spare=0, budget=1000) == ([], [])


def test_the_smallest_are_promoted_first_and_leave_some_room() -> None:
    assert demote_or_promote(DEMOTED, short=0, spare=400, budget=1000) == ([], [1])
    assert demote_or_promote(DEMOTED, short=0, spare=420, budget=1000) == ([], [1, 2])


def test_nothing_moves_where_nothing_is_short() -> None:
    assert demote_or_promote(HBM, short=0, spare=500, budget=1000) == ([], [])


def test_state_is_demoted_before_weights_and_promoted_after_them() -> None:
    """The optimizer reads it once a step, and each weight is read in forward and in backward."""
    weight = Resident(9, 400, 0, is_weight=True)
    assert demote_or_promote([weight, *HBM], short=700, spare=0, budget=1000) == ([2, 3, 1, 9], [])
    demoted = Resident(9, 400, 400, is_weight=True)
    assert demote_or_promote([*DEMOTED, demoted], short=0, spare=520, budget=1000) == ([], [9, 1])


def test_a_weight_that_there_is_no_room_for_keeps_no_other_one_out() -> None:
    weights = [Resident(1, 100, 100, is_weight=True), *(Resident(k, 10, 10, is_weight=True) for k in (2, 3))]
    state = Resident(4, 30, 30)
    assert demote_or_promote([*weights, state], short=0, spare=70, budget=1000) == ([], [2, 3, 4])


def test_weights_that_move_lie_evenly_among_those_that_do_not() -> None:
    """So the computation of those that stay hides the copies of those that do not."""
    weights = [Resident(k, 100, 0, is_weight=True) for k in range(12)]
    assert demote_or_promote(weights, short=400, spare=0, budget=1000) == ([0, 3, 6, 9], [])
    in_dram = [Resident(k, 100, 100, is_weight=True) for k in range(12)]
    assert demote_or_promote(in_dram, short=0, spare=420, budget=1000) == ([], [0, 3, 6, 9])


@given(st.lists(st.integers(1, 1000), max_size=30), st.integers(-100, 20_000))
def test_as_much_is_taken_as_is_asked_for_and_less_than_one_more(sizes: list[int], nbytes: int) -> None:
    taken = sum(sizes[place] for place in evenly(sizes, nbytes))
    wanted = max(0, min(nbytes, sum(sizes)))
    assert wanted <= taken < wanted + max(sizes, default=0) + 1
