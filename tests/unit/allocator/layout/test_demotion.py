"""State is demoted while something else lies in DRAM, and promoted when there is room to spare."""

from __future__ import annotations

from torch_tiers.allocator.layout.demotion import State, demote_or_promote

HBM = [State(1, 100, 0), State(2, 300, 0), State(3, 200, 0)]
DEMOTED = [State(1, 100, 100), State(2, 300, 300), State(3, 200, 0)]


def test_the_largest_are_demoted_until_nothing_else_needs_dram() -> None:
    assert demote_or_promote(HBM, short=350, spare=0, budget=1000) == ([2, 3], [])
    assert demote_or_promote(HBM, short=300, spare=0, budget=1000) == ([2], [])


def test_all_are_demoted_where_even_that_is_not_enough() -> None:
    assert demote_or_promote(HBM, short=5000, spare=0, budget=1000) == ([2, 3, 1], [])


def test_nothing_moves_while_only_state_lies_in_dram_and_hbm_is_full() -> None:
    assert demote_or_promote(DEMOTED, short=0, spare=0, budget=1000) == ([], [])


def test_the_smallest_are_promoted_first_and_leave_some_room() -> None:
    assert demote_or_promote(DEMOTED, short=0, spare=400, budget=1000) == ([], [1])
    assert demote_or_promote(DEMOTED, short=0, spare=420, budget=1000) == ([], [1, 2])


def test_nothing_moves_where_nothing_is_short() -> None:
    assert demote_or_promote(HBM, short=0, spare=500, budget=1000) == ([], [])
