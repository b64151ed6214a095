"""The cost of sharing pages: nothing where blocks fill whole pages, all of a page that one small block keeps."""

from __future__ import annotations

import numpy as np
import pytest

from torch_tiers.allocator.layout.false_sharing import false_sharing_share


def share(*blocks: tuple[int, int, float, float]) -> float:
    places, sizes, births, deaths = (np.array(column) for column in zip(*blocks, strict=True))
    return false_sharing_share(places, sizes, births.astype(float), deaths.astype(float), page=100)


def test_blocks_of_whole_pages_hold_nothing_for_others() -> None:
    assert share((0, 100, 0, 1), (100, 200, 0, 5)) == 0


def test_a_page_is_in_use_until_the_last_on_it_is_gone() -> None:
    assert share((0, 50, 0, 10), (50, 50, 0, 5)) == pytest.approx(0.25)


def test_what_nothing_was_ever_on_counts_too() -> None:
    assert share((0, 10, 0, 1)) == pytest.approx(0.9)


def test_a_page_that_is_free_in_between_is_not_in_use() -> None:
    assert share((0, 100, 0, 1), (0, 100, 5, 6)) == 0
