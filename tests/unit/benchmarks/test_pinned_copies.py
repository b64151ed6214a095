"""What the benchmark of pinned copies does without a GPU: memory of several makes."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from benchmarks.pinned_copies import MAKES, huge_pages, huge_share, small_pages
from torch_tiers.allocator.sizes import MiB

OFFERED = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.parametrize("make", MAKES)
def test_each_make_is_memory_of_the_size_asked_for(make: str) -> None:
    pages = MAKES[make](8 * MiB)
    assert ctypes.sizeof(pages) == 8 * MiB
    pages[0] = pages[8 * MiB - 1] = 7


def test_small_pages_are_small() -> None:
    assert huge_share(ctypes.addressof(small_pages(8 * MiB))) == 0


@pytest.mark.skipif(not OFFERED.exists() or "[never]" in OFFERED.read_text(), reason="no huge pages are offered")
def test_the_arenas_pages_are_huge() -> None:
    assert huge_share(ctypes.addressof(huge_pages(64 * MiB))) > 0.5
