"""State sinks while something else lies in DRAM, and rises when there is room to spare."""

from __future__ import annotations

from torch_tiers.allocator.layout.sinking import State, sink_or_rise

HBM = [State(1, 100, 0), State(2, 300, 0), State(3, 200, 0)]
SUNK = [State(1, 100, 100), State(2, 300, 300), State(3, 200, 0)]


def test_the_largest_sink_until_nothing_else_needs_dram() -> None:
    assert sink_or_rise(HBM, short=350, spare=0, budget=1000) == ([2, 3], [])
    assert sink_or_rise(HBM, short=300, spare=0, budget=1000) == ([2], [])


def test_all_sink_where_even_that_is_not_enough() -> None:
    assert sink_or_rise(HBM, short=5000, spare=0, budget=1000) == ([2, 3, 1], [])


def test_nothing_moves_while_only_state_lies_in_dram_and_hbm_is_full() -> None:
    assert sink_or_rise(SUNK, short=0, spare=0, budget=1000) == ([], [])


def test_the_smallest_rise_first_and_leave_some_room() -> None:
    assert sink_or_rise(SUNK, short=0, spare=400, budget=1000) == ([], [1])
    assert sink_or_rise(SUNK, short=0, spare=420, budget=1000) == ([], [1, 2])


def test_nothing_moves_where_nothing_is_short() -> None:
    assert sink_or_rise(HBM, short=0, spare=500, budget=1000) == ([], [])
