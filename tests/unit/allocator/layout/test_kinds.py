"""Which kinds of periods are laid out together: those that come back."""

from __future__ import annotations

import numpy as np
import pytest

from torch_tiers.allocator.layout.kinds import MOST, REMEMBERED, Kinds
from torch_tiers.allocator.layout.sequence import Log
from torch_tiers.allocator.native import REQUEST
from torch_tiers.allocator.native.sequence_layout import SequenceLayout


def period(length: int, *, tail: int = 0, requests: int = 20) -> Log:
    rows = [(512 * length, 0, k, k + 1, 0) for k in range(requests)]
    rows[-1] = (512 * (length + tail), 0, requests - 1, requests, 0)
    return Log(np.array(rows, REQUEST), 2 * requests)


def layout_of(length: int, stream: int = 0) -> SequenceLayout:
    return SequenceLayout(stream, np.array([512 * length]), np.zeros(1, np.uint64), np.ones(1, np.int64))


def learned(*lengths: int) -> Kinds:
    kinds = Kinds()
    for length in lengths:
        kinds.period_over(period(length))
        kinds.learn(period(length), layout_of(length))
    return kinds


def laid_out(kinds: Kinds) -> list[int]:
    return [int(one.sizes[0]) // 512 for one in kinds.layouts()]


def test_a_program_whose_periods_are_alike_has_one_layout() -> None:
    assert laid_out(learned(1, 1, 1)) == [1]


def test_what_came_and_went_takes_no_memory() -> None:
    assert laid_out(learned(1, 2, 3, 3)) == [3]


def test_what_comes_back_is_laid_out_beside_the_last() -> None:
    assert laid_out(learned(1, 2, 1)) == [1]
    assert sorted(laid_out(learned(1, 2, 1, 2))) == [1, 2]


def test_the_last_is_laid_out_even_if_it_is_new() -> None:
    assert laid_out(learned(1, 2, 1, 2, 3))[0] == 3


def test_a_few_requests_that_differ_make_no_other_kind() -> None:
    kinds = learned(1, 2)
    kinds.learn(period(1, tail=3), layout_of(1))
    kinds.learn(period(2, tail=1), layout_of(2))
    assert sorted(laid_out(kinds)) == [1, 2]


def test_what_does_not_come_any_more_is_forgotten_and_that_is_told_once() -> None:
    kinds = learned(1, 2, 1, 2)
    told = [kinds.period_over(period(2)) for _ in range(2 * REMEMBERED)]
    assert told.count(True) == 1
    assert laid_out(kinds) == [2]


def test_a_kind_that_comes_as_before_is_not_forgotten() -> None:
    kinds = learned(1, 2, 1, 2)
    kinds.period_over(period(2))
    told = [kinds.came_as_before() for _ in range(2 * REMEMBERED)]
    assert told.count(True) == 1
    assert laid_out(kinds) == [2]


def test_only_so_many_are_remembered() -> None:
    kinds = learned(*range(1, MOST + 2), *range(1, MOST + 2))
    assert len(laid_out(kinds)) == 1  # each had been forgotten when it came back


@pytest.mark.parametrize("streams", [(0, 0), (0, 7)])
def test_only_what_is_on_one_stream_shares_a_region(streams: tuple[int, int]) -> None:
    kinds = Kinds()
    for _ in range(2):
        for length, stream in zip((1, 2), streams, strict=True):
            kinds.learn(period(length), layout_of(length, stream))
    assert len(kinds.layouts()) == (2 if streams == (0, 0) else 1)


def test_before_anything_was_learned_there_is_nothing_to_lay_out() -> None:
    assert Kinds().layouts() == []
    assert not Kinds().period_over(period(1))


def test_all_are_forgotten_at_once_where_none_of_them_comes_again() -> None:
    kinds = learned(1, 2, 1, 2)
    kinds.forget()
    assert laid_out(kinds) == []
    kinds.learn(period(3), layout_of(3))
    assert laid_out(kinds) == [3]
