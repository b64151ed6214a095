"""The native core on anonymous files: sequences of requests, and layouts for them. No GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from tests.unit.cores import DRAM, HBM, PAGE, fill, holds, sequence_layout, set_layout
from torch_tiers.allocator.native import Core, CoreError, CoreFull, is_off_sequence, off_sequence
from torch_tiers.allocator.native.sequence_layout import ELSEWHERE
from torch_tiers.allocator.sizes import GiB, MiB


def test_a_layout_made_late_in_a_period_counts_the_requests_of_its_own_stream(core: Core) -> None:
    core.free(core.allocate(MiB, stream=7))
    set_layout(core, [2 * MiB, 4 * MiB], [0, 2 * MiB])
    core.allocate(2 * MiB)
    core.allocate(4 * MiB)
    assert core.counts().planned == 2


def test_a_layout_made_late_in_a_period_of_many_requests_is_not_read_past_its_end(core: Core) -> None:
    for _ in range(40):
        core.free(core.allocate(MiB, stream=7))  # of another stream, and in no sequence
    core.set_layout(sequence_layout([MiB, 2 * MiB], [0, 2 * MiB]), sequence_layout([MiB, 4 * MiB], [0, 2 * MiB]))
    core.free(core.allocate(4 * MiB))
    core.mark()
    core.free(core.allocate(MiB))
    assert core.counts().planned == 1


def test_a_request_that_no_layout_knows_finds_room_when_the_end_of_the_region_was_given_back(core: Core) -> None:
    set_layout(core, [32 * MiB], [0])
    core.free(core.allocate(48 * MiB, stream=7))  # takes what the region left, and a part of the region
    core.mark()
    address = core.allocate(8 * MiB)
    assert core.on(address, HBM) == 8 * MiB
    core.free(address)


@pytest.mark.parametrize("other", [32 * MiB, 48 * MiB], ids=["fits", "takes a part of the region"])
def test_what_the_region_and_other_streams_need_beyond_hbm_is_told_at_once(core: Core, other: int) -> None:
    """Each such step maps and unmaps pages by the hundred, and waits for the device; nothing of it lies in DRAM."""
    set_layout(core, [32 * MiB], [0])
    for _ in range(3):
        core.free(core.allocate(32 * MiB))
        core.free(core.allocate(other, stream=7))
        now = core.mark()
        assert (now.dram, now.spilled) == (0, other - 32 * MiB)


def idle_beside(core: Core) -> None:
    core.free(core.allocate(48 * MiB))


def idle_off_sequence(core: Core) -> None:
    with off_sequence():
        core.free(core.allocate(48 * MiB, stream=7))


def idle_after_a_trim(core: Core) -> None:
    core.trim()
    core.free(core.allocate(48 * MiB, stream=7))


@pytest.mark.parametrize("take", [idle_beside, idle_off_sequence, idle_after_a_trim])
def test_no_place_of_the_region_goes_to_dram_while_pages_lie_idle(core: Core, take: Callable[[Core], None]) -> None:
    """They would lie there in all later periods: nothing departs from the layout."""
    set_layout(core, [32 * MiB], [0])
    core.mark()
    take(core)
    core.mark()
    planned = core.allocate(32 * MiB)
    assert (core.on(planned, HBM), core.counts().dram) == (32 * MiB, 0)
    core.free(planned)
    core.mark()
    assert core.mark().spilled == 0


def test_what_was_trimmed_of_the_region_was_not_taken_from_it(core: Core) -> None:
    set_layout(core, [32 * MiB], [0])
    core.trim()
    core.free(core.allocate(40 * MiB, stream=7))
    core.free(core.allocate(40 * MiB, stream=8))  # on pages of the other stream
    assert core.mark().spilled == 0


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
    set_layout(core, [4 * MiB, 2 * MiB, 4 * MiB], [2 * MiB, 0, 2 * MiB])
    a = core.allocate(4 * MiB)
    b = core.allocate(2 * MiB)
    core.free(a)
    c = core.allocate(4 * MiB)
    assert (a, b) == (c, a - 2 * MiB)
    assert core.counts().planned == 3


def test_a_sequence_that_departs_is_served_where_it_fits_and_found_again(core: Core) -> None:
    sizes = [MiB * n for n in (1, 2, 3, 4, 5)]
    set_layout(core, sizes, [0, MiB, 3 * MiB, 6 * MiB, 10 * MiB])
    core.allocate(MiB)
    core.allocate(7 * MiB)  # is new
    core.allocate(3 * MiB)  # 2 MiB does not come
    core.allocate(4 * MiB)
    core.allocate(5 * MiB)
    counts = core.counts()
    assert (counts.planned, counts.mispredicted) == (3, 2)


def test_one_request_more_of_a_common_size_does_not_lose_the_place(core: Core) -> None:
    sizes = [512, 3 * MiB, 4 * MiB, 512]
    set_layout(core, sizes, [0, MiB, 4 * MiB, 8 * MiB])
    core.allocate(512)
    core.allocate(512)  # is new, and looks like the last
    core.allocate(3 * MiB)
    core.allocate(4 * MiB)
    core.allocate(512)  # has its place, which the new one was not given
    counts = core.counts()
    assert (counts.mispredicted, counts.planned, counts.misplaced) == (1, 4, 0)


def test_a_request_whose_size_varies_is_told_by_its_number(core: Core) -> None:
    sizes, offsets, vary = [512, 4 * MiB, 2 * MiB, 6 * MiB], [0, 2 * MiB, 6 * MiB, 8 * MiB], [False, True, False, True]
    core.set_layout(replace(sequence_layout(sizes, offsets), vary=np.array(vary)))
    first, *others = placed = [core.allocate(size) for size in (512, 3 * MiB, 2 * MiB, MiB)]
    assert [other - first for other in others] == offsets[1:]
    for address in placed:
        core.free(address)
    core.mark()
    first, larger, *others = [core.allocate(size) for size in (512, 5 * MiB, 2 * MiB, 6 * MiB)]
    assert larger - first not in range(14 * MiB), "it is larger than its place"
    assert [other - first for other in others] == offsets[2:]
    assert core.counts().mispredicted == 1


def test_a_period_whose_requests_are_larger_than_ever_may_have_the_region(core: Core) -> None:
    """Or it would take as much memory as it needs beside the region, which lies idle."""
    vary = np.array([True] * 12)
    core.set_layout(replace(sequence_layout([3 * MiB] * 12, [3 * MiB * k for k in range(12)]), vary=vary))
    core.mark()
    blocks = [core.allocate(4 * MiB) for _ in range(12)]
    assert core.counts().hbm_peak < 60 * MiB  # not 36 of the region and 48 besides
    for block in blocks:
        core.free(block)


def test_one_request_more_among_those_whose_sizes_vary_is_noticed_at_the_next_that_does_not(core: Core) -> None:
    sizes, vary = [512, 4 * MiB, 2 * MiB, 6 * MiB, 3 * MiB], [False, True, False, True, False]
    offsets = [0, 2 * MiB, 6 * MiB, 8 * MiB, 14 * MiB]
    core.set_layout(replace(sequence_layout(sizes, offsets), vary=np.array(vary)))
    first, *_, last = [core.allocate(size) for size in (512, MiB, MiB, 2 * MiB, 5 * MiB, 3 * MiB)]
    assert last - first == offsets[-1]


def test_a_request_off_the_sequence_is_no_part_of_it(core: Core) -> None:
    sizes, offsets = [2 * MiB, 4 * MiB, 6 * MiB], [0, 2 * MiB, 6 * MiB]
    set_layout(core, sizes, offsets)
    core.mark()
    placed = [core.allocate(2 * MiB)]
    mapped = core.counts().hbm
    with off_sequence():
        mine = core.allocate(4 * MiB)  # as large as what comes next
        with off_sequence():
            core.free(core.allocate(6 * MiB))
        core.free(core.allocate(512))  # and after what is inside
        core.free(mine)
    placed += [core.allocate(4 * MiB), core.allocate(6 * MiB)]
    core.mark()
    requests, events = core.log()
    assert [address - placed[0] for address in placed] == offsets
    assert (requests["bytes"].tolist(), events) == (sizes, 3)
    counts = core.counts()
    assert (counts.planned, counts.mispredicted, counts.misplaced) == (3, 0, 0)
    assert counts.hbm - mapped <= PAGE  # the 512 bytes: all else lay where the layout has others to come


def test_what_was_mapped_off_the_sequence_is_unmapped_and_the_region_stays(core: Core) -> None:
    core.trim_outside()  # without a layout there is nothing beside it
    set_layout(core, [4 * MiB, 4 * MiB], [0, 4 * MiB])
    first = core.allocate(4 * MiB)
    with off_sequence():
        core.free(core.allocate(20 * MiB))  # more than is free in the region
    core.free(first)
    assert core.counts().hbm >= 24 * MiB
    core.trim_outside()
    assert core.counts().hbm == core.counts().idle == 8 * MiB
    core.mark()
    core.allocate(4 * MiB)
    core.allocate(4 * MiB)
    assert core.counts().planned == 3


def test_a_request_off_the_sequence_pushes_nothing_into_dram() -> None:
    """Its region's pages would go on lying there, as nothing was mispredicted by the layout."""
    core = Core("memfd", hbm=16 * MiB, dram=16 * MiB)
    offsets = [0, 4 * MiB, 8 * MiB, 12 * MiB, 4 * MiB]
    set_layout(core, [4 * MiB] * 5, offsets)
    blocks = [core.allocate(4 * MiB) for _ in range(4)]
    core.free(blocks.pop(1))  # for the fifth; and with this one there is room for two, but not in one piece
    core.free(blocks.pop(2))
    before = core.counts()
    with off_sequence(), pytest.raises(CoreFull):
        core.allocate(8 * MiB)
    assert is_off_sequence() is False
    fifth = core.allocate(4 * MiB)
    assert (core.on(fifth, HBM), core.counts().dram, core.counts().hbm) == (4 * MiB, 0, before.hbm)
    for block in (*blocks, fifth):
        core.free(block)
    core.close()


def test_what_another_thread_asks_for_meanwhile_is_of_the_sequence(core: Core) -> None:
    with off_sequence():
        other = threading.Thread(target=lambda: core.free(core.allocate(4 * MiB)))
        other.start()
        other.join()
    core.mark()
    assert core.log()[0]["bytes"].tolist() == [4 * MiB]


def test_of_several_sequences_the_first_requests_tell_which_it_is(core: Core) -> None:
    short, long = [512, 2 * MiB, 3 * MiB], [512, 4 * MiB, 6 * MiB]  # the first is the same in both
    core.set_layout(sequence_layout(short, [0, 2 * MiB, 4 * MiB]), sequence_layout(long, [0, 2 * MiB, 6 * MiB]))
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
    assert (core.counts().mispredicted, core.counts().hbm_peak) == (0, 12 * MiB)
    core.allocate(9 * MiB)
    assert (core.glance().mispredicted, core.glance().dram) == (1, 0)


def test_a_lap_has_a_peak_of_its_own(core: Core) -> None:
    core.free(core.allocate(6 * MiB))
    kept = core.allocate(2 * MiB)
    assert [core.take_peak(), core.take_peak()] == [6 * MiB, 2 * MiB]
    core.free(core.allocate(MiB))
    assert core.take_peak() == 3 * MiB
    assert core.counts().allocated_peak == 6 * MiB
    core.free(kept)


@pytest.mark.parametrize("with_present", [True, False])
def test_what_a_lap_begins_with_counts_if_it_is_asked_for(core: Core, *, with_present: bool) -> None:
    before = core.allocate(6 * MiB)
    core.take_peak(with_present=with_present)
    core.free(before)
    kept = core.allocate(2 * MiB)
    assert core.take_peak() == (6 if with_present else 2) * MiB
    core.free(kept)
    assert core.take_peak() == 0


def test_a_sequence_that_was_not_predicted_may_have_the_region(core: Core) -> None:
    set_layout(core, [40 * MiB], [0])
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


def test_a_region_can_grow_where_it_lies_though_something_unpredicted_came(core: Core) -> None:
    set_layout(core, [8 * MiB, 3 * MiB], [0, 8 * MiB])
    region = core.allocate(8 * MiB)
    core.free(region)
    other = core.allocate(5 * MiB)  # and stays
    assert not region <= other < region + 32 * MiB
    set_layout(core, [32 * MiB], [0])
    core.mark()
    assert core.allocate(32 * MiB) == region


@pytest.mark.parametrize("offset", [MiB, GiB, 2**62])
def test_a_layout_that_reaches_past_its_region_is_refused(core: Core, offset: int) -> None:
    with pytest.raises(CoreError, match="reaches past its region"):
        set_layout(core, [2 * MiB], [offset], costs=[1])


def test_what_is_elsewhere_in_a_layout_goes_where_it_fits(core: Core) -> None:
    set_layout(core, [2 * MiB, 2 * MiB], [ELSEWHERE, 0])
    a, b = core.allocate(2 * MiB), core.allocate(2 * MiB)
    assert a != b


def test_a_place_that_is_taken_does_no_harm(core: Core) -> None:
    set_layout(core, [2 * MiB, 2 * MiB], [0, 0])
    a, b = core.allocate(2 * MiB), core.allocate(2 * MiB)
    fill(a, 2 * MiB, 1)
    fill(b, 2 * MiB, 2)
    assert holds(a, 2 * MiB, 1)
    assert core.counts().misplaced == 1


def test_a_layout_takes_no_more_memory_than_its_region(core: Core) -> None:
    for block in [core.allocate(8 * MiB) for _ in range(8)]:
        core.free(block)
    set_layout(core, [4 * MiB], [0])
    assert core.counts().hbm == 4 * MiB


def test_no_page_is_mapped_or_unmapped_in_a_period_that_repeats(core: Core) -> None:
    set_layout(core, [3 * MiB, 4 * MiB], [0, 3 * MiB])
    before = core.counts()
    for _ in range(10):
        core.mark()
        for block in [core.allocate(3 * MiB), core.allocate(4 * MiB)]:
            core.free(block)
    after = core.counts()
    assert (after.maps, after.unmaps) == (before.maps, before.unmaps)


def test_a_region_larger_than_hbm_goes_on_in_dram(core: Core) -> None:
    set_layout(core, [40 * MiB, 40 * MiB], [0, 40 * MiB])
    a, b = core.allocate(40 * MiB), core.allocate(40 * MiB)
    assert core.on(a, HBM) + core.on(b, HBM) == 64 * MiB
    assert core.on(a, DRAM) + core.on(b, DRAM) == 16 * MiB


def test_the_dearest_pages_of_a_region_lie_in_hbm(core: Core) -> None:
    set_layout(core, [40 * MiB, 40 * MiB], [0, 40 * MiB], costs=[1] * 20 + [2] * 20)
    a, b = core.allocate(40 * MiB), core.allocate(40 * MiB)
    assert (core.on(a, DRAM), core.on(b, HBM)) == (16 * MiB, 40 * MiB)
    core.free(a)
    core.free(b)
    set_layout(core, [40 * MiB, 40 * MiB], [0, 40 * MiB], costs=[2] * 20 + [1] * 20)
    a, b = core.allocate(40 * MiB), core.allocate(40 * MiB)
    assert (core.on(a, HBM), core.on(b, DRAM)) == (40 * MiB, 16 * MiB)
