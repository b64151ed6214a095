from __future__ import annotations

import itertools

import pytest

from torch_tiers.migrator.weights.placement import buffer_bytes, may_be_streamed, to_stream

BUDGET = 1000


def test_all_weights_stay_where_they_leave_room_for_the_rest() -> None:
    assert to_stream([100] * 7, 0, BUDGET) == []


@pytest.mark.parametrize("fixed", [0, 200, 600])
@pytest.mark.parametrize("sizes", [[100] * 40, [30, 90, 10, 120, 60] * 12])
def test_those_that_stay_leave_room_for_the_rest_and_the_buffer(sizes: list[int], fixed: int) -> None:
    streamed = set(to_stream(sizes, fixed, BUDGET))
    stay = sum(nbytes for place, nbytes in enumerate(sizes) if place not in streamed)
    assert stay + fixed + buffer_bytes(sizes, BUDGET) <= 0.75 * BUDGET + max(sizes)


def test_those_that_are_streamed_are_spread_evenly() -> None:
    streamed = to_stream([10] * 120, 0, BUDGET)
    gaps = [later - earlier for earlier, later in itertools.pairwise(streamed)]
    assert max(gaps) - min(gaps) <= 1


def test_all_are_streamed_where_the_rest_needs_the_budget() -> None:
    assert to_stream([100] * 8, 900, BUDGET) == list(range(8))


def test_nothing_is_streamed_where_nothing_may_be() -> None:
    assert to_stream([], 2 * BUDGET, BUDGET) == []


def test_the_buffer_holds_two_weights() -> None:
    assert buffer_bytes([10, 240], BUDGET) >= 480


def test_a_weight_that_takes_most_of_the_budget_stays() -> None:
    assert not may_be_streamed(600, BUDGET, 1)
    assert may_be_streamed(100, BUDGET, 1)
    assert not may_be_streamed(1, BUDGET, 4)
