from __future__ import annotations

from torch_tiers.migrator.weights.placement import buffer_bytes, fit, may_be_streamed

BUDGET = 1000


def test_weights_fit_where_they_leave_room_for_the_rest() -> None:
    assert fit(700, BUDGET)
    assert not fit(950, BUDGET)
    assert not fit(2000, BUDGET)


def test_the_buffer_holds_two_weights() -> None:
    assert buffer_bytes([10, 240], BUDGET) >= 480


def test_a_weight_that_takes_most_of_the_budget_stays() -> None:
    assert not may_be_streamed(600, BUDGET, 1)
    assert may_be_streamed(100, BUDGET, 1)
    assert not may_be_streamed(1, BUDGET, 4)
