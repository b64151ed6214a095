"""What happens between the periods of a GPU, on cores without one: when it is laid out anew."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

from tests.unit.one_core import OnOneCore, step
from torch_tiers.allocator.layout.kinds import REMEMBERED
from torch_tiers.allocator.native import Core, CoreBusy, CoreError, CoreFull, off_sequence
from torch_tiers.allocator.sizes import MiB


def test_the_first_period_is_laid_out_and_the_next_follows_it(pages: OnOneCore, core: Core) -> None:
    pages.begin()
    step(core, 4 * MiB, 8 * MiB)
    pages.period_over()
    step(core, 4 * MiB, 8 * MiB)
    assert core.counts().planned == 2
    before = core.counts()
    pages.period_over()
    step(core, 4 * MiB, 8 * MiB)
    after = core.counts()
    assert (after.maps, after.unmaps, after.waits) == (before.maps, before.unmaps, before.waits)


def test_a_period_with_trials_is_followed_by_one_as_any_other(pages: OnOneCore, core: Core) -> None:
    """Reserved / live was 1.2 in such a period and in the next, whose layout was made of it (ResNet: 1.99)."""
    gpu = torch.device("cuda", 0)
    pages.tidy(gpu)  # before there is a layout
    pages.begin()
    step(core, 4 * MiB, 8 * MiB)
    pages.period_over()
    first = core.allocate(4 * MiB)
    with off_sequence():
        step(core, 30 * MiB)
    second = core.allocate(8 * MiB)
    core.free(first)
    core.free(second)
    pages.tidy(gpu)
    assert core.counts().hbm == 12 * MiB
    pages.period_over()
    step(core, 4 * MiB, 8 * MiB)
    assert (core.counts().planned, core.counts().mispredicted) == (4, 0)


def test_what_cannot_be_given_back_ends_no_program(
    pages: OnOneCore, core: Core, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused() -> None:
        raise CoreError("the driver refuses")

    monkeypatch.setattr(core, "trim_outside", refused)
    pages.tidy(torch.device("cuda", 0))
    assert "stays mapped" in caplog.text


def test_the_log_of_a_period_that_was_as_predicted_is_not_read(
    pages: OnOneCore, core: Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages.begin()
    for _ in range(3):
        step(core, 4 * MiB, 8 * MiB)
        pages.period_over()
    with monkeypatch.context() as patched:
        patched.setattr(core, "log", lambda ago=0: pytest.fail("its log was read"))
        step(core, 4 * MiB, 8 * MiB)
        pages.period_over()
    step(core, 6 * MiB, 12 * MiB)
    pages.period_over()
    step(core, 6 * MiB, 12 * MiB)
    assert core.counts().planned == 2 * 3 + 2


def test_the_log_of_a_period_that_departs_a_little_and_repeats_the_one_before_is_not_read(
    pages: OnOneCore, core: Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program whose hooks rest departs a little from its layout for ever: 3,000 requests were read in each step."""
    read: list[int] = []
    monkeypatch.setattr(core, "log", lambda ago=0, log=core.log: read.append(ago) or log(ago))

    def period(*sizes: int) -> tuple[int, bool]:
        """How many requests mispredicted, and whether the log was read."""
        mispredicted = core.glance().mispredicted
        core.state(True)  # for a request that no layout has, in each period anew
        core.allocate(512)
        core.state(False)
        step(core, *sizes)
        pages.period_over()
        was_read = bool(read)
        read.clear()
        return core.glance().mispredicted - mispredicted, was_read

    pages.begin()
    seen = [period(4 * MiB, 8 * MiB) for _ in range(8)]
    assert seen[4:] == [(1, False)] * 4
    assert period(4 * MiB, 8 * MiB, 2 * MiB) == (2, True)
    assert [period(*[6 * MiB] * 6) for _ in range(2)] == [(7, True), (1, False)]


def test_a_period_that_comes_to_the_same_and_is_another_is_laid_out(pages: OnOneCore, core: Core) -> None:
    """As much by the layout, and as much beside it: but another size."""
    small, large = (4 * MiB, 8 * MiB, 2 * MiB), (4 * MiB, 8 * MiB, 20 * MiB)
    pages.begin()
    for sizes in ((4 * MiB, 8 * MiB), (4 * MiB, 8 * MiB), small, large, large):
        step(core, *sizes)
        pages.period_over()
    mispredicted = core.counts().mispredicted
    step(core, *large)
    assert core.counts().mispredicted == mispredicted


def test_what_was_asked_for_before_the_first_period_is_of_none(pages: OnOneCore, core: Core) -> None:
    step(core, 32 * MiB)  # building the model
    pages.begin()
    step(core, 4 * MiB)
    pages.period_over()
    step(core, 4 * MiB)
    assert core.counts().mispredicted == 0


def test_a_program_that_changes_is_laid_out_anew(pages: OnOneCore, core: Core) -> None:
    pages.begin()
    for sizes in ((4 * MiB, 8 * MiB), (6 * MiB, 12 * MiB), (6 * MiB, 12 * MiB)):
        step(core, *sizes)
        pages.period_over()
    assert core.counts().planned == 2  # the third was as the second
    step(core, 6 * MiB, 12 * MiB)
    assert core.counts().planned == 4


def test_kinds_of_periods_that_come_back_are_laid_out_together(pages: OnOneCore, core: Core) -> None:
    short, long = (4 * MiB, 8 * MiB), (6 * MiB, 12 * MiB)
    pages.begin()
    for sizes in (short, long, short, long):
        step(core, *sizes)
        pages.period_over()
    before = core.counts()
    for sizes in (short, long, long, short):
        step(core, *sizes)
        pages.period_over()
    after = core.counts()
    assert after.planned - before.planned == 8
    assert (after.maps, after.unmaps, after.hbm) == (before.maps, before.unmaps, 18 * MiB)


def test_of_several_kinds_of_periods_each_is_counted_when_it_comes(
    pages: OnOneCore, core: Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a look at its log; and what does not come any more is forgotten, so that its memory can go back."""
    short, long = (4 * MiB, 8 * MiB), (6 * MiB, 12 * MiB)
    pages.begin()
    for sizes in (short, long) * 3:
        step(core, *sizes)
        pages.period_over()
    monkeypatch.setattr(core, "log", lambda ago=0: pytest.fail("its log was read"))
    for sizes in (short, long) * REMEMBERED:
        step(core, *sizes)
        pages.period_over()
    assert core.counts().hbm == 18 * MiB
    for _ in range(REMEMBERED + 1):
        step(core, *short)
        pages.period_over()
    assert core.counts().hbm == 12 * MiB


def test_a_kind_that_another_begins_with_is_not_taken_for_it(pages: OnOneCore, core: Core) -> None:
    """Training, and training with an evaluation after it: the one that does not come any more is forgotten."""
    short, other, longer = (4 * MiB, 8 * MiB), (6 * MiB, 12 * MiB), (4 * MiB, 8 * MiB, 20 * MiB)
    pages.begin()
    for sizes in (short, other, longer) * 3:
        step(core, *sizes)
        pages.period_over()
    assert core.counts().hbm == 32 * MiB
    for sizes in (short, other) * (REMEMBERED + 1):
        step(core, *sizes)
        pages.period_over()
    assert core.counts().hbm == 18 * MiB


@pytest.mark.parametrize("kinds", [2, 4, 8])
def test_kinds_that_take_turns_are_all_laid_out(pages: OnOneCore, core: Core, kinds: int) -> None:
    """Each is wholly another than the one before, as where every period is new; but all of them come again."""
    pages.begin()

    def turns(count: int) -> None:
        for period in range(count):
            step(core, (2 + period % kinds) * MiB, (4 + period % kinds) * MiB)
            pages.period_over()

    turns(20 * kinds)
    before = core.counts()
    turns(2 * kinds)
    assert core.counts().mispredicted == before.mispredicted
    assert core.counts().planned - before.planned == 4 * kinds


def test_where_every_period_is_new_none_is_laid_out(pages: OnOneCore, core: Core) -> None:
    pages.begin()
    for period in range(40):
        step(core, *((1 + (7 * period + 3 * request) % 13) * MiB + period * 512 for request in range(4 + period % 3)))
        pages.period_over()
        if period == 4:
            before = core.counts()
    assert core.counts().planned == before.planned
    assert core.counts().mispredicted == before.mispredicted, "there is nothing to depart from"


def test_periods_that_differ_in_sizes_alone_are_laid_out_for_the_largest(pages: OnOneCore, core: Core) -> None:
    """As with images of many sizes. A request that is larger than ever lies elsewhere, and those after it do not."""
    pages.begin()

    def periods(numbers: Iterable[int]) -> None:
        for number in numbers:
            scale = 1 + 5 * number % 17
            step(core, 512, scale * 512 * 1024, 2 * MiB, scale * MiB, 512)
            pages.period_over()

    periods(range(34))
    before = core.counts()
    periods(range(3, 20))
    after = core.counts()
    assert after.planned - before.planned == 5 * 17
    assert (after.maps, after.unmaps, after.mispredicted) == (before.maps, before.unmaps, before.mispredicted)
    step(core, 512, 20 * MiB, 2 * MiB, MiB, 512)
    assert (core.counts().planned - after.planned, core.counts().mispredicted - after.mispredicted) == (4, 1)


def test_where_hbm_holds_each_period_and_not_all_of_the_largest_together_none_is_laid_out(
    pages: OnOneCore, core: Core
) -> None:
    """As with experts of which now one and now another has more tokens."""
    pages.begin()
    for period in range(60):
        one, other = (1 + period * 3 % 19) * MiB, (1 + period * 5 % 19) * MiB
        for block in [core.allocate(size) for size in (one, other, 60 * MiB - one - other)]:
            core.free(block)
        pages.period_over()
        assert core.counts().dram == 0
        if period == 40:
            before = core.counts()
    assert (core.counts().planned, core.counts().mispredicted) == (before.planned, before.mispredicted)


def test_what_periods_need_that_trade_sizes_off_is_not_laid_out_together(pages: OnOneCore, core: Core) -> None:
    """Nor where HBM would hold it: the region lay idle, and other streams had its pages or DRAM."""
    pages.begin()
    for period in range(60):
        one = (1 + period * 3 % 19) * MiB
        for block in [core.allocate(size) for size in (512, one, 20 * MiB - one)]:
            core.free(block)
        pages.period_over()
        if period == 30:
            before = core.counts()
    assert (core.counts().planned, core.counts().maps) == (before.planned, before.maps)


def test_where_periods_of_many_sizes_now_and_then_have_one_request_more_no_layouts_are_tried_for_ever(
    pages: OnOneCore, core: Core
) -> None:
    """As with an `if` in the model: each cost packing, and hundreds of pages to map."""
    pages.begin()
    for period in range(120):
        scale = 1 + 5 * period % 17 + period * 512 / MiB
        more = [3 * MiB] * (period % 4 == 3)
        step(core, 512, int(scale * MiB / 2), *more, 2 * MiB, int(scale * MiB), int(scale * MiB / 4))
        pages.period_over()
        if period == 60:
            before = core.counts()
    after = core.counts()
    assert after.unmaps - before.unmaps == after.mispredicted - before.mispredicted == 0


def test_a_period_that_is_many_times_as_large_once_takes_no_memory_in_those_after_it(
    pages: OnOneCore, core: Core
) -> None:
    pages.more(64 * MiB)
    pages.begin()
    for period in range(60):
        scale = 50 if period == 40 else 1 + 5 * period % 17
        step(core, 512, scale * MiB // 2, 2 * MiB, scale * MiB, 512)
        pages.period_over()
    assert (core.counts().dram, core.counts().dram_peak > 0) == (0, True)
    before = core.counts().planned
    step(core, 512, 5 * MiB, 2 * MiB, 10 * MiB, 512)
    assert core.counts().planned - before == 5


def test_what_of_a_layout_lies_in_dram_comes_to_hbm_once_there_is_room(pages: OnOneCore, core: Core) -> None:
    held = core.allocate(40 * MiB)
    assert pages.more(32 * MiB)
    pages.begin()
    for _ in range(3):
        step(core, 20 * MiB, 20 * MiB)
        pages.period_over()
    assert core.counts().dram == 16 * MiB
    core.free(held)
    for _ in range(2):
        step(core, 20 * MiB, 20 * MiB)
        pages.period_over()
    assert core.counts().dram == 0
    before = core.counts()
    step(core, 20 * MiB, 20 * MiB)
    pages.period_over()
    after = core.counts()
    assert (after.planned - before.planned, after.maps) == (2, before.maps)


def test_where_not_all_kinds_fit_the_last_is_laid_out_alone(
    pages: OnOneCore, core: Core, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pages.claims, "more", lambda device, core, nbytes: False)
    short, long = (4 * MiB, 8 * MiB), (20 * MiB, 30 * MiB)
    pages.begin()
    for sizes in (short, long, short, long):
        step(core, *sizes)
        pages.period_over()
    core.allocate(30 * MiB)  # and stays, so that the long step has no room any more
    step(core, *short, MiB, MiB, MiB, MiB, MiB)
    pages.period_over()
    assert not caplog.records
    before = core.counts().planned
    step(core, *short, MiB, MiB, MiB, MiB, MiB)
    assert core.counts().planned - before == 6  # the block that stayed is expected once more, before the first


def test_a_layout_that_found_no_room_is_made_once_there_is_some(
    pages: OnOneCore, core: Core, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It never was: without a layout nothing departs from one, and that passed for as predicted."""
    monkeypatch.setattr(pages.claims, "more", lambda device, core, nbytes: False)
    pages.begin()
    for _ in range(3):
        step(core, 4 * MiB, 2 * MiB)
        with monkeypatch.context() as patched:
            patched.setattr(core, "set_layout", _full)
            pages.period_over()
    assert core.counts().planned == 0
    for _ in range(8):
        step(core, 4 * MiB, 2 * MiB)
        pages.period_over()
    assert core.counts().planned > 0
    assert sum("no layout for now" in record.getMessage() for record in caplog.records) == 1


def _full(*layouts: object) -> None:
    raise CoreFull("every tier is full")


def test_a_layout_that_has_to_wait_for_a_capture_is_made_after_it(
    pages: OnOneCore, core: Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(*layouts: object) -> None:
        raise CoreBusy("a stream is being captured into a graph")

    pages.begin()
    step(core, 4 * MiB, 8 * MiB)
    with monkeypatch.context() as patched:
        patched.setattr(core, "set_layout", busy)
        pages.period_over()
    for _ in range(2):
        step(core, 4 * MiB, 8 * MiB)
        pages.period_over()
    assert core.counts().planned == 2


def test_a_step_that_is_said_to_be_another_goes_by_no_layout_and_the_next_by_its_own(
    pages: OnOneCore, core: Core
) -> None:
    pages.begin()
    for _ in range(2):
        step(core, 4 * MiB, 8 * MiB)
        pages.period_over()
    assert core.counts().planned == 2
    pages.expect_new_plans(torch.device("cuda", 0))
    step(core, 4 * MiB, 8 * MiB)  # what is under way when plans change ends as it began
    assert core.counts().planned == 4
    pages.period_over()
    step(core, 8 * MiB, 2 * MiB)
    assert (core.counts().planned, core.counts().mispredicted) == (4, 0)
    pages.period_over()
    step(core, 8 * MiB, 2 * MiB)
    assert core.counts().planned == 6


def test_what_a_step_that_is_over_leaves_idle_goes_back_before_the_next_begins(pages: OnOneCore, core: Core) -> None:
    """Or a user who measures the next step finds in it what the one before had mapped."""
    pages.begin()
    step(core, 4 * MiB, 8 * MiB)
    pages.period_over()
    mapped = core.counts().hbm
    assert mapped >= 12 * MiB
    pages.expect_new_plans(torch.device("cuda", 0))
    assert core.counts().hbm == mapped  # backward may still need it
    pages.expect_new_plans(torch.device("cuda", 0), 8 * MiB, now=True)
    assert core.counts().hbm == 8 * MiB, "as much as the next one is to need"
    pages.expect_new_plans(torch.device("cuda", 0), now=True)
    assert core.counts().hbm == 0


def test_what_lay_off_the_sequence_in_a_step_without_a_layout_is_unmapped_at_its_end(
    pages: OnOneCore, core: Core
) -> None:
    """Or the next step is found with what the replays that were tried in this one had mapped: 1.66 of its need."""
    device = torch.device("cuda", 0)
    pages.begin()
    step(core, 4 * MiB, 8 * MiB)
    pages.expect_new_plans(device)
    pages.period_over()
    with off_sequence():
        step(core, 16 * MiB)
    alive = core.allocate(4 * MiB)
    pages.tidy(device)
    assert core.counts().hbm == 4 * MiB
    core.free(alive)
    pages.period_over()
    pages.tidy(device)
    assert core.counts().hbm == 4 * MiB  # the layout's


def test_what_a_program_was_like_before_its_plans_changed_takes_no_memory_after(pages: OnOneCore, core: Core) -> None:
    """Every layout had the size of the largest there had been, where kinds of periods had come back: 1.09 of a step."""
    pages.begin()
    for sizes in ((8 * MiB, 8 * MiB), (4 * MiB, 4 * MiB, 4 * MiB)) * 2:
        step(core, *sizes)
        pages.period_over()
    assert core.counts().hbm == 16 * MiB
    pages.expect_new_plans(torch.device("cuda", 0))
    for _ in range(3):
        pages.period_over()
        step(core, 2 * MiB, 6 * MiB)
    assert core.counts().hbm == 8 * MiB


def test_what_is_withheld_of_the_budget_is_given_back_whatever_is_lent_meanwhile(pages: OnOneCore, core: Core) -> None:
    gpu = torch.device("cuda", 0)
    budget = core.counts().hbm_limit
    for _ in range(2):
        pages.withhold(gpu, 32 * MiB)
        assert core.counts().hbm_limit == budget - 32 * MiB
    pages.lend(gpu, 64 * MiB)
    pages.withhold(gpu, 0)
    assert core.counts().hbm_limit == budget + 64 * MiB
    pages.lend(gpu, 0)
    assert core.counts().hbm_limit == budget


def test_what_is_lent_beyond_the_budget_is_taken_back(pages: OnOneCore, core: Core) -> None:
    gpu = torch.device("cuda", 0)
    budget = core.counts().hbm_limit
    for _ in range(2):
        pages.lend(gpu, 64 * MiB)
        assert core.counts().hbm_limit == budget + 64 * MiB
    whole = core.allocate(budget + 32 * MiB)
    pages.lend(gpu, 0)
    assert core.counts().hbm_limit == budget
    core.free(whole)  # what is more than the budget by then can still be freed
    core.trim()
    assert core.counts().hbm <= budget


def test_what_lies_idle_on_other_streams_counts_with_what_is_in_use(pages: OnOneCore, core: Core) -> None:
    """The layout cannot use it. Planned without it FSDP2 went on at 0.3 of plain's speed: pages went to and fro."""
    peaks = pages.peaks(torch.device("cuda", 0))
    static = core.allocate(8 * MiB, stream=1)
    pages.begin()
    told = []
    for _ in range(4):
        core.free(core.allocate(20 * MiB, stream=1))
        core.free(core.allocate(10 * MiB, stream=2))  # once the first is given back, as FSDP2 asks for gradients
        pages.period_over()
        told.append(peaks.restart()[0])
    assert told[-1] == (8 + 20 + 10) * MiB
    core.free(static)


def test_one_stream_s_requests_lack_nothing_that_dram_does_not_show(pages: OnOneCore, core: Core) -> None:
    pages.begin()
    for _ in range(4):
        step(core, 30 * MiB, 30 * MiB)
        pages.period_over()
        assert pages.overflow(torch.device("cuda", 0)).nbytes == 0
