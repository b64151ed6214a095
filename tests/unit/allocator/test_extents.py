from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from torch_tiers.allocator.extents import Extent, ExtentMap

ALIGN = 4096


def assert_sound(extents: ExtentMap, taken: list[Extent]) -> None:
    """Nothing overlaps, leaks, is misaligned or out of bounds, and the accounts agree."""
    end = 0
    for extent in sorted(taken, key=lambda extent: extent.offset):
        assert extent.offset >= end
        assert extent.offset % ALIGN == extent.nbytes % ALIGN == 0
        end = extent.end
    free_run = extents.capacity - end
    assert free_run >= 0
    assert extents.tail_free == free_run
    assert extents.used == sum(extent.nbytes for extent in taken)


def longest_gap(extents: ExtentMap, taken: list[Extent]) -> int:
    longest = end = 0
    for extent in sorted(taken, key=lambda extent: extent.offset):
        longest, end = max(longest, extent.offset - end), extent.end
    return max(longest, extents.capacity - end)


def test_the_smallest_gap_that_holds_a_request_is_taken() -> None:
    extents = ExtentMap(100 * ALIGN, ALIGN)
    gaps = [extents.allocate(n * ALIGN) for n in (5, 1, 3, 1, 4, 1)]
    for gap in gaps[::2]:
        assert gap is not None
        extents.free(gap)
    assert extents.allocate(3 * ALIGN) == gaps[2]
    assert extents.allocate(3 * ALIGN + 1) == gaps[4]


def test_gaps_merge_on_both_sides() -> None:
    extents = ExtentMap(3 * ALIGN, ALIGN)
    left, middle, right = (extents.allocate(ALIGN) for _ in range(3))
    assert left and middle and right
    for extent in (left, right, middle):
        extents.free(extent)
    assert extents.allocate(3 * ALIGN) == Extent(0, 3 * ALIGN)


def test_a_request_is_rounded_up_to_the_alignment() -> None:
    assert ExtentMap(10 * ALIGN, ALIGN).allocate(ALIGN + 1) == Extent(0, 2 * ALIGN)


def test_capacity_is_rounded_down_to_the_alignment() -> None:
    extents = ExtentMap(2 * ALIGN - 1, ALIGN)
    assert extents.capacity == ALIGN
    assert extents.allocate(ALIGN + 1) is None


def test_what_is_freed_twice_is_refused() -> None:
    extents = ExtentMap(ALIGN, ALIGN)
    extent = extents.allocate(1)
    assert extent
    extents.free(extent)
    with pytest.raises(ValueError, match="not allocated"):
        extents.free(extent)


def test_a_stale_handle_cannot_free_its_successor() -> None:
    extents = ExtentMap(ALIGN, ALIGN)
    stale = extents.allocate(1)
    assert stale
    extents.free(stale)
    assert extents.allocate(1) == stale
    with pytest.raises(ValueError, match="not allocated"):
        extents.free(stale)


@pytest.mark.parametrize("nbytes", [0, -1])
def test_an_empty_extent_is_refused(nbytes: int) -> None:
    with pytest.raises(ValueError, match="positive"):
        ExtentMap(ALIGN, ALIGN).allocate(nbytes)


def test_an_extended_map_joins_its_old_tail() -> None:
    extents = ExtentMap(2 * ALIGN, ALIGN)
    extents.allocate(ALIGN)
    extents.extend(2 * ALIGN)
    assert extents.allocate(3 * ALIGN) == Extent(ALIGN, 3 * ALIGN)


def test_a_hundred_thousand_operations_keep_it_sound(seed: int) -> None:
    rng = random.Random(seed)
    extents = ExtentMap(4096 * ALIGN, ALIGN)
    taken: list[Extent] = []
    for step in range(100_000):
        if taken and rng.random() < 0.5:
            index = rng.randrange(len(taken))
            taken[index], taken[-1] = taken[-1], taken[index]
            extents.free(taken.pop())
        else:
            nbytes = rng.randrange(1, 64 * ALIGN)
            extent = extents.allocate(nbytes)
            if extent is None:
                assert nbytes > longest_gap(extents, taken)
            else:
                taken.append(extent)
        if step % 500 == 0:
            assert_sound(extents, taken)
    for extent in taken:
        extents.free(extent)
    assert extents.tail_free == extents.capacity
    assert extents.used == 0


class AnyOrder(RuleBasedStateMachine):
    @initialize(capacity=st.integers(0, 40 * ALIGN))
    def make(self, capacity: int) -> None:
        self.extents = ExtentMap(capacity, ALIGN)
        self.taken: list[Extent] = []

    @rule(nbytes=st.integers(1, 12 * ALIGN))
    def allocate(self, nbytes: int) -> None:
        extent = self.extents.allocate(nbytes)
        if extent is not None:
            assert nbytes <= extent.nbytes < nbytes + ALIGN
            self.taken.append(extent)

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.taken) - 1))
        self.extents.free(self.taken.pop(index))

    @rule(nbytes=st.integers(0, 8 * ALIGN))
    def extend(self, nbytes: int) -> None:
        self.extents.extend(nbytes)

    @invariant()
    def sound(self) -> None:
        assert_sound(self.extents, self.taken)


AnyOrder.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAnyOrder = AnyOrder.TestCase
