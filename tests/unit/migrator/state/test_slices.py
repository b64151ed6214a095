"""An optimizer's step is cut into slices, and the buffer is as large as pays."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from torch_tiers.allocator.sizes import GiB, MiB
from torch_tiers.migrator.state.slices import ABREAST, SLICE, buffer_bytes, cut, in_chunks, largest

SIZES = st.lists(st.integers(1, 200), max_size=40)


@given(SIZES, st.integers(1, 300))
def test_slices_have_all_parts_in_order_and_none_is_larger_than_it_may_be_unless_it_is_one_part(
    sizes: list[int], most: int
) -> None:
    slices = list(cut(sizes, sizes, most))
    assert [part for slice_ in slices for part in slice_] == sizes
    assert all(slice_ and (sum(slice_) <= most or len(slice_) == 1) for slice_ in slices)


@given(SIZES, st.integers(1, 300))
def test_a_slice_has_no_room_for_the_first_part_of_the_next(sizes: list[int], most: int) -> None:
    slices = list(cut(sizes, sizes, most))
    assert all(sum(one) + other[0] > most for one, other in itertools.pairwise(slices))


@given(SIZES.filter(bool))
def test_the_buffer_holds_every_slice(sizes: list[int]) -> None:
    assert max(sizes) <= buffer_bytes(sizes) <= ABREAST * max(SLICE, *sizes)


def test_slices_of_one_size_come_and_leave_at_once() -> None:
    assert buffer_bytes([SLICE] * 20) == ABREAST * SLICE


def test_one_slice_that_is_far_larger_than_the_others_is_alone_in_the_buffer() -> None:
    assert buffer_bytes([100 * MiB] * 20 + [500 * MiB]) == 500 * MiB


def test_what_has_no_slices_has_no_buffer() -> None:
    assert buffer_bytes([]) == 0


def test_state_that_takes_much_of_the_budget_stays_where_it_lies() -> None:
    assert largest(1 * MiB) == SLICE, "a slice always may come"
    assert largest(16 * GiB) == 1 * GiB


@given(st.integers(0, 5 * SLICE))
def test_chunks_are_all_of_it_and_slices_but_for_the_last(nbytes: int) -> None:
    chunks = in_chunks(nbytes)
    assert sum(chunks) == nbytes
    assert all(chunk == SLICE for chunk in chunks[:-1]) and all(0 < chunk <= SLICE for chunk in chunks)
