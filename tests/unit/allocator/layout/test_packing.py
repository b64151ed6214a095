"""Packing: nothing overlaps in both time and space, and little is wasted."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_tiers.allocator.layout.packing import Ints, pack
from torch_tiers.allocator.native import CoreError

EVENTS = 20
SEQUENCES = Path(__file__).parents[3] / "data" / "sequences"


@st.composite
def lives(draw: st.DrawFn) -> tuple[int, int, int]:
    birth = draw(st.integers(0, EVENTS - 1))
    return draw(st.integers(1, 50)), birth, birth + draw(st.integers(1, EVENTS))


def times(birth: int, death: int) -> set[int]:
    return {event % EVENTS for event in range(birth, death)}


@given(st.lists(lives(), max_size=30))
def test_no_two_overlap_in_time_and_space(requests: list[tuple[int, int, int]]) -> None:
    sizes, births, deaths = (list(values) for values in zip(*requests, strict=True)) if requests else ([], [], [])
    layout = pack(sizes, births, deaths, EVENTS)
    for i, (size, birth, death) in enumerate(requests):
        assert 0 <= layout.offsets[i] <= layout.total - size
        for j in range(i):
            apart = layout.offsets[i] + size <= layout.offsets[j] or layout.offsets[j] + sizes[j] <= layout.offsets[i]
            assert apart or not times(birth, death) & times(births[j], deaths[j])
    alive = [sum(size for size, *life in requests if event in times(*life)) for event in range(EVENTS)]
    assert layout.total >= layout.least == max(alive)


def test_requests_that_follow_one_another_share_a_place() -> None:
    layout = pack([10, 10, 10], [0, 2, 4], [1, 3, 5], 6)
    assert layout.offsets.tolist() == [0, 0, 0]
    assert layout.total == 10


def test_a_small_request_lies_in_the_gap_that_larger_ones_leave() -> None:
    # The third begins when the first is gone, whose place it takes but for two bytes, which the fourth fits.
    layout = pack([10, 10, 8, 2], [0, 0, 5, 5], [4, 9, 9, 9], 10)
    assert layout.total == 20


def test_what_is_alive_at_the_end_of_a_period_is_alive_at_the_begin_of_the_next() -> None:
    layout = pack([10, 10], [8, 0], [12, 1], 10)  # the first lives from 8 to 2 of the next period
    assert layout.offsets[0] != layout.offsets[1]
    assert layout.least == 20


def test_a_request_that_would_meet_itself_is_refused() -> None:
    with pytest.raises(CoreError, match="longer than a period"):
        pack([1], [3], [14], 10)


def test_nothing_takes_no_room() -> None:
    assert pack([], [], [], 0).total == 0


def full_all_the_time() -> tuple[Ints, Ints, Ints, int]:
    """Requests of the long-context GPT at half of its memory, from an H100: sizes, births, deaths, events."""
    recorded = json.loads(gzip.decompress((SEQUENCES / "long-context-moving.json.gz").read_bytes()))
    sizes, births, deaths = np.array(recorded["requests"], np.int64).T
    return sizes, births, deaths, recorded["events"]


def test_a_period_that_is_full_all_the_time_leaves_few_holes() -> None:
    """By size alone they took 11% more than is alive; by the best of a search over orders, 6%."""
    layout = pack(*full_all_the_time())
    assert layout.total < 1.02 * layout.least


def test_the_search_goes_on_until_there_is_room_for_what_it_found() -> None:
    """It takes half a second, and two on a slow host: after a step that logged something, training waited for it."""
    period = full_all_the_time()
    tight, loose = pack(*period), pack(*period, room=1 << 60)
    assert tight.total < loose.total < 1.05 * loose.least
    between = (tight.total + loose.total) // 2
    assert tight.total < pack(*period, room=between).total <= between


def test_a_period_packs_as_well_from_another_begin() -> None:
    sizes, births, deaths, events = full_all_the_time()
    begin = events // 2
    layout = pack(sizes, (births - begin) % events, (births - begin) % events + deaths - births, events)
    assert layout.total < 1.03 * layout.least


@pytest.mark.parametrize("seed", range(4))
def test_a_period_of_other_sizes_packs_as_well(seed: int) -> None:
    """Sizes that no longer are multiples of one another, as they are in other programs."""
    sizes, births, deaths, events = full_all_the_time()
    kinds, kind = np.unique(sizes, return_inverse=True)
    factors = np.random.default_rng(seed).uniform(0.8, 1.2, len(kinds))[kind]
    layout = pack(-(-(sizes * factors).astype(np.int64) // 512) * 512, births, deaths, events)
    assert layout.total < 1.03 * layout.least
