from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from torch_tiers.allocator.nvme.checksum import byte_sum, lane_sum, lane_sum_numpy, sum_for
from torch_tiers.allocator.sizes import KiB

WORDS = arrays.arrays(np.uint64, st.integers(1, 300), elements=st.integers(0, 2**64 - 1))


@given(WORDS)
def test_torch_and_numpy_compute_the_same_lane_sum(words: np.ndarray) -> None:
    data = words.view(np.uint8)
    found = lane_sum(torch.from_numpy(data))
    assert found == lane_sum_numpy(data)
    assert 0 <= found < 2**64


@given(st.integers(4 * KiB // 8, 256 * KiB // 8))
def test_they_do_for_blocks_of_any_length(count: int) -> None:
    data = np.random.default_rng(count).integers(2**64, size=count, dtype=np.uint64, endpoint=False).view(np.uint8)
    assert lane_sum(torch.from_numpy(data)) == lane_sum_numpy(data)


def test_the_lane_sum_is_its_formula_over_integers() -> None:
    words = [0, 1, 2**32 - 1, 2**63, 2**64 - 1]
    keys = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC, 0x1B39896A51A8749B]
    expected = 0
    for word, key in zip(words, keys, strict=True):  # the keys are what splitmix64 yields from 0
        low = (word + key) % 2**32
        high = ((word >> 32) + (key >> 32)) % 2**32
        expected += low * high + word
    assert lane_sum_numpy(np.array(words, dtype=np.uint64).view(np.uint8)) == expected % 2**64


@given(WORDS, st.data())
def test_any_flipped_bit_changes_the_lane_sum(words: np.ndarray, data: st.DataObject) -> None:
    before = lane_sum_numpy(words.view(np.uint8))
    bit = data.draw(st.integers(0, words.size * 64 - 1))
    words[bit // 64] ^= np.uint64(1 << bit % 64)
    assert lane_sum_numpy(words.view(np.uint8)) != before


@given(st.lists(st.integers(0, 2**64 - 1), min_size=2, max_size=50, unique=True), st.data())
def test_words_that_change_places_change_the_lane_sum(values: list[int], data: st.DataObject) -> None:
    words = np.array(values, dtype=np.uint64)
    one, other = data.draw(st.lists(st.integers(0, words.size - 1), min_size=2, max_size=2, unique=True))
    before = lane_sum_numpy(words.view(np.uint8))
    words[[one, other]] = words[[other, one]]
    assert lane_sum_numpy(words.view(np.uint8)) != before


@pytest.mark.parametrize("fill", [0, 255])
def test_blocks_of_one_value_differ_by_their_length(fill: int) -> None:
    sums = {lane_sum(torch.full((nbytes,), fill, dtype=torch.uint8)) for nbytes in range(4 * KiB, 64 * KiB, 4 * KiB)}
    assert len(sums) == 15


def test_host_memory_has_its_own_faster_sum() -> None:
    assert sum_for(torch.zeros(4 * KiB, dtype=torch.uint8)) is byte_sum
