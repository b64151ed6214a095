"""The native core on anonymous files: what lies idle, whom it serves, and when it goes back. No GPU."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.unit.cores import DRAM, HBM, PAGE, holds, opened, set_layout
from torch_tiers.allocator.native import Core, CoreFull, off_sequence
from torch_tiers.allocator.native.sequence_layout import SequenceLayout
from torch_tiers.allocator.sizes import GiB, MiB


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


def test_a_request_that_begins_in_free_memory_takes_from_elsewhere_what_is_missing_there_and_no_more() -> None:
    """Of a mixture of experts the largest request unmapped what it was to begin in, page by page: 275 waits a step."""
    core = Core("memfd", hbm=12 * PAGE, dram=12 * PAGE)
    blocks = [core.allocate(pages * PAGE) for pages in (3, 1, 3, 1, 4)]
    for block in blocks[::2]:
        core.free(block)  # the last lies beside what was never mapped, and is the largest
    before = core.counts()
    block = core.allocate(9 * PAGE)
    after = core.counts()
    assert core.on(block, HBM) == 9 * PAGE
    assert (after.maps - before.maps, after.unmaps - before.unmaps, after.waits - before.waits) == (5, 5, 1)


def test_a_request_that_fits_in_another_place_alone_is_served_there() -> None:
    """The place with the fewest pages to map begins in those that are idle: to lie elsewhere it needs the same ones."""
    core = Core("memfd", hbm=6 * PAGE, dram=0)
    _, hole, _, last = (core.allocate(nbytes) for nbytes in (5 * PAGE // 8, 11 * PAGE // 4, 5 * PAGE // 8, 2 * PAGE))
    core.free(hole)
    core.trim()  # of two pages, with parts of others on either side
    core.allocate(2 * PAGE, stream=1)
    core.free(last)
    core.allocate(11 * PAGE // 4)


def half_full(*, dram: int = GiB) -> Core:
    """A core of 200 MiB of HBM, half of which is in use in pieces that no large request fits between."""
    core = Core("memfd", hbm=200 * MiB, dram=dram)
    blocks = [core.allocate(20 * MiB) for _ in range(10)]
    for block in blocks[::2]:
        core.free(block)
    return core


def test_of_a_large_request_only_what_hbm_has_no_room_for_lies_in_dram() -> None:
    """A mixture of experts lacked 60 MiB, and all of its 1.25 GiB of logits were read over the link."""
    core = half_full()
    block = core.allocate(120 * MiB)
    assert (core.on(block, HBM), core.on(block, DRAM)) == (100 * MiB, 20 * MiB)
    assert core.glance().spilled_so_far == 20 * MiB


def test_what_lay_in_dram_of_a_large_request_serves_nobody_once_that_is_freed() -> None:
    core = half_full()
    core.free(core.allocate(120 * MiB))
    for block in [core.allocate(10 * MiB) for _ in range(10)]:
        assert core.on(block, DRAM) == 0
    assert core.counts().hbm == 200 * MiB


def test_a_small_request_or_one_for_most_of_which_hbm_has_no_room_lies_in_dram_as_a_whole() -> None:
    """Those after it would find no idle page in HBM."""
    core = half_full()
    large, small = core.allocate(140 * MiB), core.allocate(60 * MiB)
    assert (core.on(large, DRAM), core.on(small, HBM)) == (140 * MiB, 60 * MiB)
    assert core.on(core.allocate(50 * MiB), DRAM) == 50 * MiB


def test_a_large_request_takes_nothing_in_hbm_where_dram_has_no_room_for_the_rest() -> None:
    core = half_full(dram=8 * MiB)
    with pytest.raises(CoreFull):
        core.allocate(120 * MiB)
    block = core.allocate(60 * MiB)
    assert core.on(block, HBM) == 60 * MiB


def test_a_large_request_beside_a_layout_leaves_its_idle_pages_alone() -> None:
    core = Core("memfd", hbm=200 * MiB, dram=GiB)
    set_layout(core, [150 * MiB], [0], [1] * 75)
    block = core.allocate(220 * MiB, stream=2)
    assert core.on(block, DRAM) == 220 * MiB


@pytest.mark.parametrize("costs", [[1] * 32 + [2] * 8, [2] * 32 + [1] * 8], ids=["first", "last"])
def test_idle_hbm_is_taken_from_a_region_of_which_a_part_lies_in_dram(core: Core, costs: list[int]) -> None:
    set_layout(core, [80 * MiB], [0], costs)
    block = core.allocate(32 * MiB, stream=2)
    assert core.on(block, HBM) == 32 * MiB
    counts = core.counts()
    assert (counts.hbm, counts.dram) == (64 * MiB, 16 * MiB)


def test_idle_dram_of_a_region_serves_whoever_finds_no_hbm(core: Core) -> None:
    set_layout(core, [80 * MiB], [0], [1] * 8 + [2] * 32)
    core.allocate(64 * MiB, stream=2)
    core.allocate(64 * MiB, stream=2)
    counts = core.counts()
    assert (counts.allocated, counts.idle) == (128 * MiB, 0)


def without_growth(core: Core, kept: int) -> None:
    """Plans change, and so much of HBM stays."""
    core.mark()
    core.forget_layout(kept)
    core.trim(kept)


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


def test_most_of_what_stays_of_it_stays_mapped_where_it_is() -> None:
    """To unmap all of it, and to map it anew, made each change of plans of a GPT take a second."""
    with opened(GiB, 0) as core:
        core.allocate(4 * MiB)
        core.free(core.allocate(796 * MiB))
        for _ in range(20):
            core.free(core.allocate(MiB))
        without_growth(core, 600 * MiB)
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
        without_growth(core, 800 * MiB)
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
        without_growth(core, 900 * MiB)
        counts = core.counts()
        assert 100 * MiB < counts.idle <= 300 * MiB
        core.allocate(700 * MiB)
        assert (core.counts().waits, core.counts().hbm) == (counts.waits, 900 * MiB)


def test_no_dram_stays_for_the_next_plan(core: Core) -> None:
    set_layout(core, [80 * MiB], [0])
    assert core.counts().dram == 16 * MiB
    without_growth(core, 64 * MiB)
    assert (core.counts().hbm, core.counts().dram) == (64 * MiB, 0)


def test_what_is_idle_goes_back_to_the_system_when_asked(core: Core) -> None:
    kept = core.allocate(4 * MiB)
    core.free(core.allocate(40 * MiB))
    core.trim()
    assert core.counts().hbm == 4 * MiB
    assert holds(kept, 4 * MiB, 0)


def test_what_a_forgotten_layout_had_mapped_serves_whatever_comes(core: Core) -> None:
    core.set_layout(
        SequenceLayout(0, np.array([8 * MiB]), np.array([0], np.uint64), np.ones(8 * MiB // PAGE, np.int64))
    )
    assert core.counts().planned == 0
    core.forget_layout()
    mapped = core.counts().maps
    blocks = [core.allocate(size) for size in (3 * MiB, 5 * MiB)]
    assert core.counts().maps == mapped
    assert (core.counts().planned, core.counts().mispredicted) == (0, 0)
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
        (lambda core: core.forget_layout(), 10),
        (lambda core: core.forget_layout(14 * MiB), 16),  # that much will be alive, so the hole will be of use
        (lambda core: (core.forget_layout(), core.mark()), 16),
        (
            lambda core: (core.forget_layout(), [core.free(core.allocate(2 * MiB)) for _ in range(4)]),
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
    core.forget_layout()
    core.reset_peaks()
    core.allocate(8 * MiB)
    assert core.counts().hbm_peak == 12 * MiB  # with the other 2 MiB in use
    core.free(last)


def test_a_request_off_the_sequence_grows_as_little_and_uses_up_nothing_of_it(core: Core) -> None:
    """Recipes are tried off the sequence then: what they had mapped anew came on top of what lay idle, by 845 MiB."""
    with_a_hole(core)
    core.forget_layout()
    core.reset_peaks()
    with off_sequence():
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
    core.forget_layout()
    before = core.counts()
    core.allocate(12 * MiB)
    assert core.counts().hbm - before.hbm <= 6 * MiB


def test_a_full_hbm_is_told_also_in_a_period_after_a_forgotten_layout() -> None:
    core = Core("memfd", hbm=8 * MiB, dram=0)
    with_a_hole(core)
    core.forget_layout()
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
