"""State is demoted while something else lies in DRAM, and promoted when there is room to spare."""

from __future__ import annotations

from torch_tiers.allocator.layout.demotion import Resident, demote_or_promote

HBM = [Resident(1, 100, 0), Resident(2, 300, 0), Resident(3, 200, 0)]
DEMOTED = [Resident(1, 100, 100), Resident(2, 300, 300), Resident(3, 200, 0)]


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


def test_state_is_demoted_before_weights_and_promoted_after_them() -> None:
    """The optimizer reads it once a step, and each weight is read in forward and in backward."""
    weight = Resident(9, 400, 0, is_weight=True)
    assert demote_or_promote([weight, *HBM], short=700, spare=0, budget=1000) == ([2, 3, 1, 9], [])
    demoted = Resident(9, 400, 400, is_weight=True)
    assert demote_or_promote([*DEMOTED, demoted], short=0, spare=520, budget=1000) == ([], [9, 1])
