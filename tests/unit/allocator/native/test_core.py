"""The native core on anonymous files: blocks, tiers, pools, layouts, counters. No GPU."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator

import numpy as np
import psutil
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from allocator.native import Core, CoreError, CoreFull, aside, is_aside
from allocator.sequence import ELSEWHERE, Foreseen
from allocator.sizes import GiB, MiB

PAGE = 2 * MiB
HBM, DRAM = 0, 1
FREE, USED = 1, 2


@contextlib.contextmanager
def opened(hbm: int, dram: int) -> Iterator[Core]:
    made = Core("memfd", hbm, dram)
    yield made
    for block in made.blocks():
        if block["kind"] == USED:
            made.free(int(block["address"]))
    made.close()


@pytest.fixture
def core() -> Iterator[Core]:
    with opened(64 * MiB, 64 * MiB) as made:
        yield made


def fill(address: int, nbytes: int, value: int) -> None:
    ctypes.memset(address, value, nbytes)


def holds(address: int, nbytes: int, value: int) -> bool:
    return ctypes.string_at(address, nbytes) == bytes([value]) * nbytes


def foreseen(sizes: list[int], offsets: list[int], visits: list[int] | None = None) -> Foreseen:
    ends = [size + offset for size, offset in zip(sizes, offsets, strict=True) if offset != ELSEWHERE]
    pages = np.array(visits or [1] * -(-max(ends) // PAGE))
    return Foreseen(0, np.array(sizes), np.array(offsets, np.uint64), pages)


def plan(core: Core, sizes: list[int], offsets: list[int], visits: list[int] | None = None) -> None:
    core.plan(foreseen(sizes, offsets, visits))


def test_a_layout_made_late_in_a_period_counts_the_requests_of_its_own_stream(core: Core) -> None:
    core.free(core.allocate(MiB, stream=7))
    plan(core, [2 * MiB, 4 * MiB], [0, 2 * MiB])
    core.allocate(2 * MiB)
    core.allocate(4 * MiB)
    assert core.counts().planned == 2


def test_a_layout_made_late_in_a_period_of_many_requests_is_not_read_past_its_end(core: Core) -> None:
    for _ in range(40):
        core.free(core.allocate(MiB, stream=7))  # of another stream, and in no sequence
    core.plan(foreseen([MiB, 2 * MiB], [0, 2 * MiB]), foreseen([MiB, 4 * MiB], [0, 2 * MiB]))
    core.free(core.allocate(4 * MiB))
    core.mark()
    core.free(core.allocate(MiB))
    assert core.counts().planned == 1


def test_a_request_that_no_layout_knows_finds_room_when_the_end_of_the_region_was_given_back(core: Core) -> None:
    plan(core, [32 * MiB], [0])
    core.free(core.allocate(48 * MiB, stream=7))  # takes what the region left, and a part of the region
    core.mark()
    address = core.allocate(8 * MiB)
    assert core.on(address, HBM) == 8 * MiB
    core.free(address)


def test_blocks_are_aligned_as_pytorch_aligns_them_and_can_be_written(core: Core) -> None:
    addresses = [core.allocate(n) for n in (1, 511, 512, 513, MiB, MiB + 1, 3 * MiB)]
    assert all(address % 512 == 0 for address in addresses)
    for value, address in enumerate(addresses):
        fill(address, 1, value)
    assert [ctypes.string_at(address, 1)[0] for address in addresses] == list(range(7))


def test_what_was_given_back_is_handed_out_again_at_once(core: Core) -> None:
    first = core.allocate(8 * MiB)
    core.free(first)
    assert core.allocate(8 * MiB) == first
    assert core.counts().hbm == 8 * MiB


def test_streams_do_not_share_what_was_given_back(core: Core) -> None:
    first = core.allocate(8 * MiB, stream=1)
    core.free(first)
    assert core.allocate(8 * MiB, stream=2) != first


def test_a_block_used_on_another_stream_comes_back_when_that_is_done(core: Core) -> None:
    block = core.allocate(8 * MiB, stream=1)
    core.used_on(block, stream=2)
    core.free(block)
    assert core.allocate(8 * MiB, stream=1) == block  # without a GPU all work is done when it is given


def test_hbm_comes_first_and_dram_when_it_is_full(core: Core) -> None:
    blocks = [core.allocate(16 * MiB) for _ in range(6)]
    assert [core.on(block, HBM) > 0 for block in blocks] == [True] * 4 + [False] * 2
    counts = core.counts()
    assert (counts.hbm, counts.dram) == (64 * MiB, 32 * MiB)


def test_memory_ends_only_where_every_tier_does(core: Core) -> None:
    for _ in range(8):
        core.allocate(16 * MiB)
    with pytest.raises(CoreFull, match="every tier is full"):
        core.allocate(MiB)


def test_idle_hbm_of_another_stream_is_taken_before_dram(core: Core) -> None:
    core.free(core.allocate(64 * MiB, stream=1))
    block = core.allocate(48 * MiB, stream=2)
    assert core.on(block, HBM) == 48 * MiB
    assert core.counts().dram == 0


def test_idle_hbm_in_fragments_is_taken_before_dram(core: Core) -> None:
    blocks = [core.allocate(8 * MiB) for _ in range(8)]
    for block in blocks[::2]:
        core.free(block)
    block = core.allocate(32 * MiB)
    assert core.on(block, HBM) == 32 * MiB
    assert core.counts().dram == 0


def test_idle_hbm_beside_a_hole_is_taken_though_more_is_mapped_anew_then() -> None:
    core = Core("memfd", hbm=12 * PAGE, dram=12 * PAGE)
    blocks = [core.allocate(pages * PAGE) for pages in (3, 1, 3, 1, 4)]
    for block in blocks[::2]:
        core.free(block)  # the last lies beside what was never mapped, and is the largest
    block = core.allocate(9 * PAGE)
    assert core.on(block, HBM) == 9 * PAGE


@pytest.mark.parametrize("visits", [[1] * 32 + [2] * 8, [2] * 32 + [1] * 8], ids=["first", "last"])
def test_idle_hbm_is_taken_from_a_region_of_which_a_part_lies_in_dram(core: Core, visits: list[int]) -> None:
    plan(core, [80 * MiB], [0], visits)
    block = core.allocate(32 * MiB, stream=2)
    assert core.on(block, HBM) == 32 * MiB
    counts = core.counts()
    assert (counts.hbm, counts.dram) == (64 * MiB, 16 * MiB)


def test_idle_dram_of_a_region_serves_whoever_finds_no_hbm(core: Core) -> None:
    plan(core, [80 * MiB], [0], [1] * 8 + [2] * 32)
    core.allocate(64 * MiB, stream=2)
    core.allocate(64 * MiB, stream=2)
    counts = core.counts()
    assert (counts.allocated, counts.idle) == (128 * MiB, 0)


def test_retired_pools_use_up_neither_memory_nor_addresses(core: Core) -> None:
    for pool in range(1, 400):  # twice as many as there are addresses for
        core.free(core.allocate(4 * MiB, pool=pool))
        core.retire(pool)
        core.trim()
    counts = core.counts()
    assert (counts.hbm, counts.maps, counts.unmaps) == (0, 2 * 399, 2 * 399)


def test_a_retired_pool_is_there_as_long_as_something_of_it_is_in_use(core: Core) -> None:
    block = core.allocate(4 * MiB, pool=1)
    core.retire(1)
    core.trim()
    fill(block, 4 * MiB, 7)
    core.free(block)
    core.trim()
    assert core.counts().hbm == 0


def test_a_private_pool_keeps_its_memory_until_it_is_retired(core: Core) -> None:
    core.free(core.allocate(64 * MiB, pool=1))
    block = core.allocate(32 * MiB)
    assert core.on(block, DRAM) == 32 * MiB  # a graph may still replay into the pool's pages
    core.free(block)
    core.trim()
    core.retire(1)
    assert core.on(core.allocate(32 * MiB), HBM) == 32 * MiB


def test_of_what_is_idle_as_much_stays_as_is_needed_next_mapped_nowhere(core: Core) -> None:
    kept = core.allocate(4 * MiB)
    core.free(core.allocate(40 * MiB))
    core.trim(keep=24 * MiB)
    counts = core.counts()
    assert (counts.hbm, counts.idle) == (24 * MiB, 0)
    core.allocate(20 * MiB, stream=1)
    assert core.counts().hbm == 24 * MiB
    core.trim(keep=2 * MiB)
    assert core.counts().hbm == 24 * MiB, "what is in use is no matter of this"
    core.free(kept)
    core.trim()
    assert core.counts().hbm == 20 * MiB


def thrifty(core: Core, kept: int) -> None:
    """Plans change, and so much of HBM stays."""
    core.mark()
    core.forget_plan(kept)
    core.trim(kept)


def test_most_of_what_stays_of_it_stays_mapped_where_it_is() -> None:
    """To unmap all of it, and to map it anew, made each change of plans of a GPT take a second."""
    with opened(GiB, 0) as core:
        core.allocate(4 * MiB)
        core.free(core.allocate(796 * MiB))
        for _ in range(20):
            core.free(core.allocate(MiB))
        thrifty(core, 600 * MiB)
        counts = core.counts()
        assert counts.hbm == 600 * MiB
        assert 400 * MiB < counts.idle < 500 * MiB
        core.free(core.allocate(counts.idle))
        assert core.counts().maps == counts.maps
        for _ in range(20):
            core.allocate(MiB)  # blocks that have pages of their own
        assert core.counts().waits == counts.waits, "for those some pages were taken out"
        core.allocate(500 * MiB, stream=1)
        assert core.counts().hbm <= 600 * MiB + PAGE, "and what comes from elsewhere gets the rest"


def test_many_small_blocks_do_not_wait_for_a_page_each_where_the_rest_lies_mapped() -> None:
    with opened(GiB, 0) as core:
        core.free(core.allocate(800 * MiB))
        for _ in range(400):
            core.free(core.allocate(MiB))
        thrifty(core, 800 * MiB)
        waits = core.counts().waits
        for _ in range(400):
            core.allocate(MiB)
        counts = core.counts()
        assert counts.waits - waits < 6, "of two hundred pages more than a hundred are taken from elsewhere"
        assert counts.hbm <= 804 * MiB


def test_what_state_leaves_idle_is_not_what_stays_mapped() -> None:
    """Nobody else may have it where it is."""
    with opened(GiB, 0) as core:
        core.state(True)
        state = core.allocate(600 * MiB)
        core.state(False)
        core.free(core.allocate(300 * MiB))
        core.free(state)
        thrifty(core, 900 * MiB)
        counts = core.counts()
        assert 100 * MiB < counts.idle <= 300 * MiB
        core.allocate(700 * MiB)
        assert (core.counts().waits, core.counts().hbm) == (counts.waits, 900 * MiB)


def test_no_dram_stays_for_the_next_plan(core: Core) -> None:
    plan(core, [80 * MiB], [0])
    assert core.counts().dram == 16 * MiB
    thrifty(core, 64 * MiB)
    assert (core.counts().hbm, core.counts().dram) == (64 * MiB, 0)


def test_what_is_idle_goes_back_to_the_system_when_asked(core: Core) -> None:
    kept = core.allocate(4 * MiB)
    core.free(core.allocate(40 * MiB))
    core.trim()
    assert core.counts().hbm == 4 * MiB
    assert holds(kept, 4 * MiB, 0)


def test_a_block_moves_between_tiers_under_its_address(core: Core) -> None:
    block = core.allocate(12 * MiB)
    fill(block, 12 * MiB, 7)
    core.move(block, DRAM)
    assert core.on(block, DRAM) == 12 * MiB
    assert holds(block, 12 * MiB, 7)
    core.move(block, HBM)
    assert core.on(block, HBM) == 12 * MiB
    assert holds(block, 12 * MiB, 7)


def test_a_block_stays_where_it_is_when_the_other_tier_has_no_room() -> None:
    core = Core("memfd", hbm=16 * MiB, dram=4 * MiB)
    block = core.allocate(12 * MiB)
    fill(block, 12 * MiB, 7)
    with pytest.raises(CoreFull, match="dram is full"):
        core.move(block, DRAM)
    assert holds(block, 12 * MiB, 7)
    core.free(block)
    core.close()


def test_freeing_what_is_not_in_use_is_an_error(core: Core) -> None:
    block = core.allocate(MiB)
    core.free(block)
    for address in (block, block + 512, 12345):
        with pytest.raises(CoreError, match="nothing in use"):
            core.free(address)


def test_a_request_larger_than_all_tiers_is_refused_and_leaves_nothing(core: Core) -> None:
    with pytest.raises(CoreFull):
        core.allocate(GiB)
    assert core.counts().allocated == 0
    core.allocate(64 * MiB)


def test_the_log_tells_the_events_of_births_and_deaths(core: Core) -> None:
    core.mark()
    a = core.allocate(1000)
    b = core.allocate(2000)
    core.free(a)
    core.mark()
    requests, events = core.log()
    assert events == 3
    assert requests["bytes"].tolist() == [1024, 2048]
    assert requests["birth"].tolist() == [0, 1]
    assert requests["death"].tolist() == [2, -1]
    core.free(b)
    core.mark()
    before, _ = core.log(1)
    assert before["death"].tolist() == [2, 3]  # the first event of the period after it


def test_a_period_without_end_has_no_log(core: Core) -> None:
    """Such as an evaluation, or a program that never trains: it would grow for ever, and take hours to lay out."""
    core.free(core.allocate(512))
    core.mark()
    last = core.allocate(512)
    for _ in range(40_000):
        core.free(core.allocate(512))
    core.mark()
    core.free(last)
    core.mark()
    assert [len(core.log(ago)[0]) for ago in (0, 1)] == [0, 0]
    core.free(core.allocate(512))
    core.mark()
    assert len(core.log()[0]) == 1


def test_a_layout_puts_requests_where_it_says(core: Core) -> None:
    plan(core, [4 * MiB, 2 * MiB, 4 * MiB], [2 * MiB, 0, 2 * MiB])
    a = core.allocate(4 * MiB)
    b = core.allocate(2 * MiB)
    core.free(a)
    c = core.allocate(4 * MiB)
    assert (a, b) == (c, a - 2 * MiB)
    assert core.counts().planned == 3


def test_a_sequence_that_departs_is_served_where_it_fits_and_found_again(core: Core) -> None:
    sizes = [MiB * n for n in (1, 2, 3, 4, 5)]
    plan(core, sizes, [0, MiB, 3 * MiB, 6 * MiB, 10 * MiB])
    core.allocate(MiB)
    core.allocate(7 * MiB)  # is new
    core.allocate(3 * MiB)  # 2 MiB does not come
    core.allocate(4 * MiB)
    core.allocate(5 * MiB)
    counts = core.counts()
    assert (counts.planned, counts.departed) == (3, 2)


def test_one_request_more_of_a_common_size_does_not_lose_the_place(core: Core) -> None:
    sizes = [512, 3 * MiB, 4 * MiB, 512]
    plan(core, sizes, [0, MiB, 4 * MiB, 8 * MiB])
    core.allocate(512)
    core.allocate(512)  # is new, and looks like the last
    core.allocate(3 * MiB)
    core.allocate(4 * MiB)
    core.allocate(512)  # has its place, which the new one was not given
    counts = core.counts()
    assert (counts.departed, counts.planned, counts.misplaced) == (1, 4, 0)


def test_what_is_asked_for_aside_is_no_part_of_the_sequence(core: Core) -> None:
    sizes, offsets = [2 * MiB, 4 * MiB, 6 * MiB], [0, 2 * MiB, 6 * MiB]
    plan(core, sizes, offsets)
    core.mark()
    placed = [core.allocate(2 * MiB)]
    mapped = core.counts().hbm
    with aside():
        mine = core.allocate(4 * MiB)  # as large as what comes next
        with aside():
            core.free(core.allocate(6 * MiB))
        core.free(core.allocate(512))  # and after what is inside
        core.free(mine)
    placed += [core.allocate(4 * MiB), core.allocate(6 * MiB)]
    core.mark()
    requests, events = core.log()
    assert [address - placed[0] for address in placed] == offsets
    assert (requests["bytes"].tolist(), events) == (sizes, 3)
    counts = core.counts()
    assert (counts.planned, counts.departed, counts.misplaced) == (3, 0, 0)
    assert counts.hbm - mapped <= PAGE  # the 512 bytes: all else lay where the layout has others to come


def test_what_was_mapped_for_work_aside_goes_back_and_the_region_stays(core: Core) -> None:
    core.trim_outside()  # without a layout there is nothing beside it
    plan(core, [4 * MiB, 4 * MiB], [0, 4 * MiB])
    first = core.allocate(4 * MiB)
    with aside():
        core.free(core.allocate(20 * MiB))  # more than is free in the region
    core.free(first)
    assert core.counts().hbm >= 24 * MiB
    core.trim_outside()
    assert core.counts().hbm == core.counts().idle == 8 * MiB
    core.mark()
    core.allocate(4 * MiB)
    core.allocate(4 * MiB)
    assert core.counts().planned == 3


def test_what_is_aside_pushes_nothing_into_dram() -> None:
    """Its region's pages would go on lying there, as nothing has departed from the layout."""
    core = Core("memfd", hbm=16 * MiB, dram=16 * MiB)
    offsets = [0, 4 * MiB, 8 * MiB, 12 * MiB, 4 * MiB]
    plan(core, [4 * MiB] * 5, offsets)
    blocks = [core.allocate(4 * MiB) for _ in range(4)]
    core.free(blocks.pop(1))  # for the fifth; and with this one there is room for two, but not in one piece
    core.free(blocks.pop(2))
    before = core.counts()
    with aside(), pytest.raises(CoreFull):
        core.allocate(8 * MiB)
    assert is_aside() is False
    fifth = core.allocate(4 * MiB)
    assert (core.on(fifth, HBM), core.counts().dram, core.counts().hbm) == (4 * MiB, 0, before.hbm)
    for block in (*blocks, fifth):
        core.free(block)
    core.close()


def test_what_another_thread_asks_for_meanwhile_is_not_aside(core: Core) -> None:
    with aside():
        other = threading.Thread(target=lambda: core.free(core.allocate(4 * MiB)))
        other.start()
        other.join()
    core.mark()
    assert core.log()[0]["bytes"].tolist() == [4 * MiB]


def test_of_several_sequences_the_first_requests_tell_which_it_is(core: Core) -> None:
    short, long = [512, 2 * MiB, 3 * MiB], [512, 4 * MiB, 6 * MiB]  # the first is the same in both
    core.plan(foreseen(short, [0, 2 * MiB, 4 * MiB]), foreseen(long, [0, 2 * MiB, 6 * MiB]))
    assert core.counts().hbm == 12 * MiB  # they share a region
    places = []
    for sizes in (long, short, long, long):
        core.mark()
        places.append([core.allocate(size) for size in sizes])
        assert core.glance().present == (sizes is long)
        for address in places[-1]:
            core.free(address)
    base = places[0][0]
    assert [[address - base for address in period] for period in places] == [
        [0, 2 * MiB, 6 * MiB],
        [0, 2 * MiB, 4 * MiB],
        [0, 2 * MiB, 6 * MiB],
        [0, 2 * MiB, 6 * MiB],
    ]
    assert (core.counts().departed, core.counts().hbm_peak) == (0, 12 * MiB)
    core.allocate(9 * MiB)
    assert (core.glance().departed, core.glance().dram) == (1, 0)


def test_a_lap_has_a_peak_of_its_own(core: Core) -> None:
    core.free(core.allocate(6 * MiB))
    kept = core.allocate(2 * MiB)
    assert [core.lap(), core.lap()] == [6 * MiB, 2 * MiB]
    core.free(core.allocate(MiB))
    assert core.lap() == 3 * MiB
    assert core.counts().allocated_peak == 6 * MiB
    core.free(kept)


def test_a_sequence_that_nobody_foresaw_may_have_the_region(core: Core) -> None:
    plan(core, [40 * MiB], [0])
    for _ in range(3):
        core.mark()
        for block in [core.allocate(6 * MiB) for _ in range(6)]:
            core.free(block)
    core.reset_peaks()
    core.mark()
    blocks = [core.allocate(6 * MiB) for _ in range(6)]
    assert core.counts().hbm_peak < 70 * MiB  # not 40 of the region and 36 besides
    assert core.counts().maps <= 20 + 12
    for block in blocks:
        core.free(block)


def test_a_region_can_grow_where_it_lies_though_something_unforeseen_came(core: Core) -> None:
    plan(core, [8 * MiB, 3 * MiB], [0, 8 * MiB])
    region = core.allocate(8 * MiB)
    core.free(region)
    other = core.allocate(5 * MiB)  # and stays
    assert not region <= other < region + 32 * MiB
    plan(core, [32 * MiB], [0])
    core.mark()
    assert core.allocate(32 * MiB) == region


@pytest.mark.parametrize("offset", [MiB, GiB, 2**62])
def test_a_layout_that_reaches_past_its_region_is_refused(core: Core, offset: int) -> None:
    with pytest.raises(CoreError, match="reaches past its region"):
        plan(core, [2 * MiB], [offset], visits=[1])


def test_what_is_elsewhere_in_a_layout_goes_where_it_fits(core: Core) -> None:
    plan(core, [2 * MiB, 2 * MiB], [ELSEWHERE, 0])
    a, b = core.allocate(2 * MiB), core.allocate(2 * MiB)
    assert a != b


def test_a_place_that_is_taken_does_no_harm(core: Core) -> None:
    plan(core, [2 * MiB, 2 * MiB], [0, 0])
    a, b = core.allocate(2 * MiB), core.allocate(2 * MiB)
    fill(a, 2 * MiB, 1)
    fill(b, 2 * MiB, 2)
    assert holds(a, 2 * MiB, 1)
    assert core.counts().misplaced == 1


def test_a_layout_takes_no_more_memory_than_its_region(core: Core) -> None:
    for block in [core.allocate(8 * MiB) for _ in range(8)]:
        core.free(block)
    plan(core, [4 * MiB], [0])
    assert core.counts().hbm == 4 * MiB


def test_no_page_is_mapped_or_unmapped_in_a_period_that_repeats(core: Core) -> None:
    plan(core, [3 * MiB, 4 * MiB], [0, 3 * MiB])
    before = core.counts()
    for _ in range(10):
        core.mark()
        for block in [core.allocate(3 * MiB), core.allocate(4 * MiB)]:
            core.free(block)
    after = core.counts()
    assert (after.maps, after.unmaps) == (before.maps, before.unmaps)


def test_a_region_larger_than_hbm_goes_on_in_dram(core: Core) -> None:
    plan(core, [40 * MiB, 40 * MiB], [0, 40 * MiB])
    a, b = core.allocate(40 * MiB), core.allocate(40 * MiB)
    assert core.on(a, HBM) + core.on(b, HBM) == 64 * MiB
    assert core.on(a, DRAM) + core.on(b, DRAM) == 16 * MiB


def test_the_busiest_pages_of_a_region_lie_in_hbm(core: Core) -> None:
    plan(core, [40 * MiB, 40 * MiB], [0, 40 * MiB], visits=[1] * 20 + [2] * 20)
    a, b = core.allocate(40 * MiB), core.allocate(40 * MiB)
    assert (core.on(a, DRAM), core.on(b, HBM)) == (16 * MiB, 40 * MiB)
    core.free(a)
    core.free(b)
    plan(core, [40 * MiB, 40 * MiB], [0, 40 * MiB], visits=[2] * 20 + [1] * 20)
    a, b = core.allocate(40 * MiB), core.allocate(40 * MiB)
    assert (core.on(a, HBM), core.on(b, DRAM)) == (40 * MiB, 16 * MiB)


def test_a_limit_that_is_lowered_holds_for_what_comes(core: Core) -> None:
    core.limit(HBM, 8 * MiB)
    core.allocate(8 * MiB)
    assert core.on(core.allocate(8 * MiB), DRAM) == 8 * MiB


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(CoreError, match="no such backend"):
        Core("rocm", hbm=MiB, dram=0)


class Blocks(RuleBasedStateMachine):
    """Any order of requests, frees, moves, trims and layouts: no overlap, no lost byte, no cap exceeded."""

    addresses = Bundle("addresses")

    def __init__(self) -> None:
        super().__init__()
        self.core = Core("memfd", hbm=32 * PAGE, dram=32 * PAGE)
        self.live: dict[int, tuple[int, int]] = {}
        self.made = 0

    @rule(
        target=addresses,
        nbytes=st.one_of(st.integers(1, 4096), st.integers(1, 6 * PAGE)),
        stream=st.integers(0, 2),
        pool=st.sampled_from([0, 0, 0, 1]),
        apart=st.sampled_from([False, False, True]),
    )
    def allocate(self, nbytes: int, stream: int, pool: int, apart: bool) -> int:
        try:
            with aside() if apart else contextlib.nullcontext():
                address = self.core.allocate(nbytes, stream, pool)
        except CoreFull:
            return 0
        self.made += 1
        value = self.made % 251 + 1
        for begin, (size, _) in self.live.items():
            assert address + nbytes <= begin or begin + size <= address
        self.live[address] = (nbytes, value)
        for at in {address, address + nbytes - 1}:
            fill(at, 1, value)
        return address

    @rule(address=consumes(addresses))
    def free(self, address: int) -> None:
        if address in self.live:
            self.check(address)
            self.core.free(address)
            del self.live[address]

    @rule(address=addresses, stream=st.integers(0, 2))
    def use(self, address: int, stream: int) -> None:
        if address in self.live:
            self.core.used_on(address, stream)

    @rule(address=addresses, tier=st.sampled_from([HBM, DRAM]))
    def move(self, address: int, tier: int) -> None:
        if address in self.live:
            with contextlib.suppress(CoreFull):
                self.core.move(address, tier)
            self.check(address)

    @rule(outside=st.booleans())
    def trim(self, outside: bool) -> None:
        if outside:
            self.core.trim_outside()
        else:
            self.core.trim()

    @rule()
    def period(self) -> None:
        self.core.mark()

    @rule(
        sizes=st.lists(st.integers(1, 64).map(lambda n: 512 * n * 64), min_size=1, max_size=8), seed=st.integers(0, 9)
    )
    def plan(self, sizes: list[int], seed: int) -> None:
        offsets = (np.random.default_rng(seed).integers(0, 64, len(sizes)) * 512 * 16).tolist()
        with contextlib.suppress(CoreFull):
            self.core.plan(foreseen(sizes, offsets), foreseen(sizes[::-1], offsets))

    @rule()
    def forget_plan(self) -> None:
        self.core.forget_plan()

    def check(self, address: int) -> None:
        nbytes, value = self.live[address]
        assert ctypes.string_at(address, 1)[0] == value
        assert ctypes.string_at(address + nbytes - 1, 1)[0] == value

    @invariant()
    @precondition(lambda self: hasattr(self, "core"))
    def caps_hold_and_nothing_overlaps(self) -> None:
        counts = self.core.counts()
        assert counts.hbm <= 32 * PAGE
        assert counts.dram <= 32 * PAGE
        assert counts.allocated == sum(-(-size // 512) * 512 for size, _ in self.live.values())
        blocks = np.sort(self.core.blocks(), order="address")
        assert np.all(blocks["address"][1:] >= (blocks["address"] + blocks["bytes"])[:-1])
        used = {int(block["address"]) for block in blocks if block["kind"] == USED}
        assert used == set(self.live)

    def teardown(self) -> None:
        for address in list(self.live):
            self.check(address)
            self.core.free(address)
        self.core.close()


TestBlocks = Blocks.TestCase
TestBlocks.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_what_a_forgotten_layout_had_mapped_serves_whatever_comes(core: Core) -> None:
    core.plan(Foreseen(0, np.array([8 * MiB]), np.array([0], np.uint64), np.ones(8 * MiB // PAGE, np.int64)))
    assert core.counts().planned == 0
    core.forget_plan()
    mapped = core.counts().maps
    blocks = [core.allocate(size) for size in (3 * MiB, 5 * MiB)]
    assert core.counts().maps == mapped
    assert (core.counts().planned, core.counts().departed) == (0, 0)
    for block in blocks:
        core.free(block)
    core.trim_outside()  # of no layout


def with_a_hole(core: Core) -> None:
    """A period that leaves 6 MiB idle below 2 MiB in use."""
    first, _ = core.allocate(6 * MiB), core.allocate(2 * MiB)
    core.free(first)
    core.mark()


@pytest.mark.parametrize(
    ("forgets", "most"),
    [
        (lambda core: core.forget_plan(), 10),
        (lambda core: core.forget_plan(14 * MiB), 16),  # that much will be alive, so the hole will be of use
        (lambda core: (core.forget_plan(), core.mark()), 16),
        (
            lambda core: (core.forget_plan(), [core.free(core.allocate(2 * MiB)) for _ in range(4)]),
            16,
        ),  # of two requests
        (lambda core: None, 16),
    ],
)
def test_a_period_after_a_forgotten_layout_makes_no_pages_while_others_lie_idle(
    core: Core, forgets: Callable[[Core], object], most: int
) -> None:
    with_a_hole(core)
    forgets(core)
    core.reset_peaks()
    core.allocate(8 * MiB)  # than which the hole is smaller
    assert core.counts().hbm_peak <= most * MiB
    assert core.counts().hbm_peak > (most - 4) * MiB
    assert core.counts().retries == 0  # there was room


def test_what_state_has_in_dram_makes_no_room_for_pages_in_hbm(core: Core) -> None:
    state = core.allocate(8 * MiB)
    with_a_hole(core)
    core.move(state, DRAM)
    core.trim()  # of what it had in HBM, and of the hole
    first, last = core.allocate(6 * MiB), core.allocate(2 * MiB)
    core.free(first)
    core.mark()
    core.forget_plan()
    core.reset_peaks()
    core.allocate(8 * MiB)
    assert core.counts().hbm_peak == 12 * MiB  # with the other 2 MiB in use
    core.free(last)


def test_a_request_aside_is_as_thrifty_and_uses_up_nothing_of_it(core: Core) -> None:
    """Formulas are tried aside in that period: what they had mapped anew came on top of what lay idle, by 845 MiB."""
    with_a_hole(core)
    core.forget_plan()
    core.reset_peaks()
    with aside():
        for _ in range(8):  # four requests of its own and it would be over
            core.free(core.allocate(8 * MiB))
    core.allocate(9 * MiB)
    assert core.counts().hbm_peak == 12 * MiB


def test_pages_of_which_a_part_is_in_use_are_no_reason_to_leave_others_idle(core: Core) -> None:
    """They were more than what may be made beyond what is alive: then all of a request was made anew, beside a hole."""
    pairs = [(core.allocate(PAGE + 512), core.allocate(PAGE)) for _ in range(8)]
    hole, _ = core.allocate(6 * MiB), core.allocate(3 * MiB)
    for _, second in pairs:
        core.free(second)  # which leaves parts of pages, and no whole one
    core.free(hole)
    core.mark()
    core.forget_plan()
    before = core.counts()
    core.allocate(12 * MiB)
    assert core.counts().hbm - before.hbm <= 6 * MiB


def test_a_full_hbm_is_told_also_in_a_period_after_a_forgotten_layout() -> None:
    core = Core("memfd", hbm=8 * MiB, dram=0)
    with_a_hole(core)
    core.forget_plan()
    with pytest.raises(CoreFull):
        core.allocate(8 * MiB)
    assert core.counts().retries == 1
    core.allocate(6 * MiB)  # and the limit is what it was


def test_what_does_not_fit_into_hbm_leaves_there_what_lies_idle() -> None:
    """Each such request unmapped all of it, and the next ones mapped it again: 100 pages a step, and two waits."""
    core = Core("memfd", hbm=64 * MiB, dram=128 * MiB)
    for _ in range(3):
        core.free(core.allocate(24 * MiB, stream=1))
        core.free(core.allocate(16 * MiB, stream=2))
        before = core.counts()
        large = core.allocate(100 * MiB, stream=3)
        after = core.counts()
        assert (after.unmaps, after.waits) == (before.unmaps, before.waits)
        assert core.on(large, DRAM) == 100 * MiB
        core.free(large)
    core.close()


def test_a_request_of_all_that_can_be_counted_finds_every_tier_full() -> None:
    core = Core("memfd", hbm=64 * MiB, dram=0)
    for nbytes in (2**64 - 1, 2**63, 2**61):
        with pytest.raises(CoreFull):
            core.allocate(nbytes)
    core.close()


def test_many_streams_leave_addresses_to_others() -> None:
    """Each heap reserved a terabyte: at the 69th stream the process had no addresses left."""
    before = psutil.Process().memory_info().vms
    core = Core("memfd", hbm=512 * MiB, dram=0)
    blocks = [core.allocate(2 * MiB, stream=stream) for stream in range(1, 200)]
    assert psutil.Process().memory_info().vms - before < 64 << 40
    for block in blocks:
        core.free(block)
    core.close()
