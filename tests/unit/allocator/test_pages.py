"""The page allocator's periods, on cores without a GPU: when it lays out anew, what sinks, what it claims."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from allocator import adapter
from allocator.claims import UNUSED
from allocator.dram import DramArena
from allocator.kinds import REMEMBERED
from allocator.ledger import Ledger
from allocator.native import DRAM, HBM, Core, CoreBusy, CoreError, CoreFull, aside
from allocator.pages import PATIENCE, PageAllocator
from allocator.room import FRESH, Room
from allocator.sizes import PAGE, MiB


class OnOneCore(PageAllocator):
    """On a core of anonymous files in place of PyTorch's GPUs."""

    def __init__(self, core: Core, dram: int, ledger: Ledger | None, room: Callable[[], Room] | None = None) -> None:
        super().__init__(Path(), core.counts().hbm_limit, dram, ledger and ledger.open_account("dram", dram), room)
        self.core = core

    def cores(self) -> Iterator[tuple[int, Core]]:
        yield 0, self.core


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> Core:
    made = Core("memfd", hbm=64 * MiB, dram=0)
    monkeypatch.setattr(adapter, "core_of", lambda library, device: made)
    return made


@pytest.fixture
def pages(core: Core, tmp_path: Path) -> OnOneCore:
    return OnOneCore(core, 64 * MiB, Ledger(tmp_path / "ledger"))


def step(core: Core, *sizes: int) -> None:
    for address in [core.allocate(size) for size in sizes]:
        core.free(address)


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


def test_an_evaluation_that_hbm_has_no_room_for_leaves_no_trace(pages: OnOneCore, core: Core) -> None:
    """What lay idle in DRAM after it passed for what periods have no room for: state sank there, for good."""
    pages.begin()
    pages.state(True)
    state = core.allocate(16 * MiB)
    pages.state(False)
    for period in range(3 * PATIENCE):
        step(core, 10 * MiB, 12 * MiB, 14 * MiB)
        planned = core.counts().planned
        assert planned == 3 * period, "all that trains lies as laid out"
        pages.step_over()
        if period in (3, 9):
            pages._more(0, 32 * MiB)  # as the adapter would ask
            step(core, *[4 * MiB] * 20)
            assert core.counts().dram > 0
        pages.period_over()
        assert (core.counts().dram, pages.overflow(torch.device("cuda", 0))) == (0, 0)
        assert core.on(state, HBM) == 16 * MiB


def test_the_dram_that_an_evaluation_had_is_somebody_else_s_after_it(
    pages: OnOneCore, core: Core, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("allocator.claims.STEP", PAGE)
    pages.begin()
    for period in range(4):
        step(core, 10 * MiB, 20 * MiB)
        pages.step_over()
        if period == 3:
            assert pages._full(0, 48 * MiB)
            step(core, *[8 * MiB] * 12)
        pages.period_over()
    assert Ledger(tmp_path / "ledger").used("dram") == 0


def test_what_comes_after_every_step_is_the_periods_own_though_hbm_has_no_room_for_it(
    pages: OnOneCore, core: Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A teacher, for one: to lay out the rest anew after each would take longer than it does."""
    monkeypatch.setattr("allocator.claims.STEP", PAGE)
    laid_out, plan = [0], core.plan
    monkeypatch.setattr(core, "plan", lambda *layouts: (plan(*layouts), laid_out.append(laid_out.pop() + 1)))
    pages.begin()
    for period in range(16):
        step(core, 10 * MiB, 20 * MiB)
        pages.step_over()
        pages._full(0, 48 * MiB)
        step(core, *[8 * MiB] * 12)
        pages.period_over()
        if period == 8:
            settled = laid_out[0]
    assert laid_out[0] == settled


def test_training_that_needs_dram_is_not_taken_for_an_evaluation(pages: OnOneCore, core: Core) -> None:
    """Whatever comes after its step: that is no larger."""
    pages._more(0, 64 * MiB)
    pages.begin()
    for _ in range(6):
        step(core, 30 * MiB, 50 * MiB)
        pages.step_over()
        step(core, 20 * MiB)
        pages.period_over()
    assert pages.overflow(torch.device("cuda", 0)) > 0


def test_an_evaluation_that_hbm_has_room_for_is_laid_out_with_the_rest(pages: OnOneCore, core: Core) -> None:
    """In the memory that training has: beside it there was no room the first time."""
    pages.begin()
    for period in range(12):
        step(core, 20 * MiB, 20 * MiB)
        pages.step_over()
        if period % 4 == 3:
            pages._more(0, 32 * MiB)
            step(core, 30 * MiB, 6 * MiB)
        pages.period_over()
    assert core.counts().dram == 0
    before = core.counts().departed
    step(core, 20 * MiB, 20 * MiB)
    step(core, 30 * MiB, 6 * MiB)
    assert core.counts().departed == before


def test_a_period_with_trials_is_followed_by_one_as_any_other(pages: OnOneCore, core: Core) -> None:
    """Reserved / live was 1.2 in such a period and in the next, whose layout was made of it (ResNet: 1.99)."""
    gpu = torch.device("cuda", 0)
    pages.tidy(gpu)  # before there is a layout
    pages.begin()
    step(core, 4 * MiB, 8 * MiB)
    pages.period_over()
    first = core.allocate(4 * MiB)
    with aside():
        step(core, 30 * MiB)
    second = core.allocate(8 * MiB)
    core.free(first)
    core.free(second)
    pages.tidy(gpu)
    assert core.counts().hbm == 12 * MiB
    pages.period_over()
    step(core, 4 * MiB, 8 * MiB)
    assert (core.counts().planned, core.counts().departed) == (4, 0)


def test_nothing_is_claimed_for_what_is_asked_for_aside(pages: OnOneCore, core: Core) -> None:
    with aside():
        assert not pages._full(0, 4 * MiB)
        assert pages._more(0, 4 * MiB)  # for a layout, which is made aside in recorded periods


def test_what_cannot_be_given_back_ends_no_program(
    pages: OnOneCore, core: Core, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused() -> None:
        raise CoreError("the driver refuses")

    monkeypatch.setattr(core, "trim_outside", refused)
    pages.tidy(torch.device("cuda", 0))
    assert "stays mapped" in caplog.text
    monkeypatch.setattr(adapter, "core_of", lambda library, device: None)  # before the first request
    pages.tidy(torch.device("cuda", 0))


def test_the_log_of_a_period_that_was_as_foreseen_is_not_read(
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


def test_the_budget_of_a_gpu_is_what_its_core_may_map_of_hbm(pages: OnOneCore, core: Core) -> None:
    """Not what is free and reserved: what is reserved may lie in DRAM, and plans would keep what does not fit."""
    assert pages._more(0, 64 * MiB)
    lies = core.allocate(64 * MiB), core.allocate(8 * MiB)
    assert core.on(lies[1], DRAM)
    assert pages.limit(torch.device("cuda", 0)) == 64 * MiB
    assert pages.limit(torch.device("cpu")) == 0


def test_what_was_asked_for_before_the_first_period_is_of_none(pages: OnOneCore, core: Core) -> None:
    step(core, 32 * MiB)  # building the model
    pages.begin()
    step(core, 4 * MiB)
    pages.period_over()
    step(core, 4 * MiB)
    assert core.counts().departed == 0


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


def test_where_not_all_kinds_fit_the_last_is_laid_out_alone(
    pages: OnOneCore, core: Core, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pages, "_more", lambda device, nbytes, least=PAGE: False)
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


def test_dram_is_claimed_from_the_ledger_when_hbm_is_full(pages: OnOneCore, core: Core, tmp_path: Path) -> None:
    core.allocate(60 * MiB)
    assert pages._more(0, 16 * MiB)
    assert core.on(core.allocate(16 * MiB), DRAM) == 16 * MiB
    assert Ledger(tmp_path / "ledger").used("dram") == 64 * MiB
    assert not pages._more(0, 16 * MiB)  # all that it may have


def test_no_more_dram_is_claimed_than_the_system_leaves(core: Core, caplog: pytest.LogCaptureFixture) -> None:
    left = 4 * MiB
    pages = OnOneCore(core, 64 * MiB, None, lambda: Room(left, "the others are many"))
    core.allocate(64 * MiB)
    assert pages._more(0, 16 * MiB)
    assert core.on(core.allocate(4 * MiB), DRAM) == 4 * MiB
    left = 0
    time.sleep(2 * FRESH)
    assert not pages._more(0, 16 * MiB) and not pages._more(0, 16 * MiB)
    assert [record.getMessage() for record in caplog.records] == [
        "dram stays at 4.0 MiB of 64.0 MiB for now: the others are many"
    ]


def test_what_cannot_be_served_takes_nothing_of_the_node_s_dram(
    pages: OnOneCore, core: Core, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request of a size mistaken took all of it, from other ranks and from what moves, for good."""
    monkeypatch.setattr("allocator.claims.STEP", PAGE)
    assert not pages._full(0, 100 << 30)
    assert Ledger(tmp_path / "ledger").used("dram") == 0
    assert pages._full(0, 48 * MiB)
    assert Ledger(tmp_path / "ledger").used("dram") == 48 * MiB


def test_where_no_dram_is_left_what_the_arena_has_idle_makes_room(
    pages: OnOneCore, core: Core, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The arena had all of it since a period was recorded, in which all moves: the program ran out of memory."""
    monkeypatch.setattr("allocator.claims.STEP", PAGE)
    ledger = Ledger(tmp_path / "ledger")
    arena = DramArena(64 * MiB, pinned=False, step=4 * MiB, account=ledger.open_account("dram", 64 * MiB))
    blocks = [arena.allocate(4 * MiB) for _ in range(16)]
    for block in blocks[4:]:
        assert block is not None
        arena.free(block)
    pages.borrow(arena.give_back)
    assert pages._full(0, 8 * MiB)
    assert (core.counts().dram_limit, arena.grown) == (8 * MiB, 56 * MiB)
    assert not caplog.records, "of what was had in the end"
    assert not pages._more(0, 8 * MiB), "which a layout can do without"
    assert not pages._full(0, 60 * MiB), "the rest is in use"
    arena.close()


def test_where_the_system_leaves_nothing_the_arena_gives_back_what_others_need_besides(
    pages: OnOneCore, core: Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A little more than is kept for others was in use, for which the arena's own keeper gives nothing back."""
    monkeypatch.setattr("allocator.claims.STEP", PAGE)
    idle = [64 * MiB]

    def lend(nbytes: int) -> int:
        idle[0] -= nbytes
        return nbytes

    without_ledger = OnOneCore(core, 64 * MiB, None, lambda: Room(44 * MiB - idle[0], "others", slack=32 * MiB))
    without_ledger.borrow(lend)
    assert without_ledger._full(0, 8 * MiB)
    assert idle == [64 * MiB - 28 * MiB]


def test_where_the_driver_gives_no_host_memory_nobody_is_asked_for_any(pages: OnOneCore, core: Core) -> None:
    def refused(tier: int, nbytes: int) -> None:
        raise CoreError("cuMemCreate of host memory: CUDA_ERROR_NOT_PERMITTED")

    core.limit = refused  # type: ignore[method-assign]
    pages.borrow(lambda nbytes: pytest.fail("the arena is asked"))
    assert not pages._full(0, 8 * MiB)


def test_dram_that_is_not_used_any_more_goes_back_to_the_node(
    pages: OnOneCore, core: Core, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("allocator.claims.STEP", 4 * MiB)
    ledger = Ledger(tmp_path / "ledger")
    assert pages._more(0, 32 * MiB)
    pages.begin()
    for _ in range(UNUSED):
        assert ledger.used("dram") == 32 * MiB
        step(core, 4 * MiB)
        pages.period_over()
    assert ledger.used("dram") == core.counts().dram_limit == 0
    assert pages._more(0, 32 * MiB)
    lies = core.allocate(64 * MiB), core.allocate(8 * MiB)
    for _ in range(2 * UNUSED):
        pages.period_over()
    assert 8 * MiB <= ledger.used("dram") == core.counts().dram_limit < 32 * MiB
    assert core.on(lies[1], DRAM) == 8 * MiB


def test_where_the_driver_gives_no_host_memory_hbm_is_all_there_is_and_that_is_said_once(
    pages: OnOneCore, core: Core, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(tier: int, nbytes: int) -> None:
        raise CoreError("cuMemCreate of host memory: CUDA_ERROR_NOT_PERMITTED")

    monkeypatch.setattr(core, "limit", refused)
    assert not pages._full(0, 4 * MiB) and not pages._full(0, 4 * MiB)
    assert Ledger(tmp_path / "ledger").used("dram") == 0
    assert [record.getMessage() for record in caplog.records] == [
        "no more dram than 0 B for the gpu: cuMemCreate of host memory: CUDA_ERROR_NOT_PERMITTED"
    ]


def test_a_layout_that_found_no_room_is_made_once_there_is_some(
    pages: OnOneCore, core: Core, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It never was: without a layout nothing departs from one, and that passed for as foreseen."""
    monkeypatch.setattr(pages, "_more", lambda device, nbytes, least=PAGE: False)
    pages.begin()
    for _ in range(3):
        step(core, 4 * MiB, 2 * MiB)
        with monkeypatch.context() as patched:
            patched.setattr(core, "plan", _full)
            pages.period_over()
    assert core.counts().planned == 0
    for _ in range(8):
        step(core, 4 * MiB, 2 * MiB)
        pages.period_over()
    assert core.counts().planned > 0
    assert sum("no layout for now" in record.getMessage() for record in caplog.records) == 1


def _full(*foreseen: object) -> None:
    raise CoreFull("every tier is full")


def test_state_sinks_when_the_rest_does_not_fit(pages: OnOneCore, core: Core) -> None:
    core.state(True)
    state = [core.allocate(16 * MiB) for _ in range(3)]
    core.state(False)
    pages._more(0, 64 * MiB)
    pages.begin()
    for _ in range(PATIENCE):
        step(core, 24 * MiB, 16 * MiB)
        pages.period_over()
    assert sum(core.on(block, DRAM) for block in state) >= 24 * MiB
    hot = core.allocate(24 * MiB)
    assert core.on(hot, HBM) == 24 * MiB
    core.free(hot)


def test_state_does_not_move_while_another_thread_trains(pages: OnOneCore, core: Core) -> None:
    """Which may launch a kernel on it between the wait for the device and the end of the move."""
    core.state(True)
    state = core.allocate(48 * MiB)
    core.state(False)
    pages._more(0, 64 * MiB)
    pages.begin()
    for _ in range(2 * PATIENCE):
        step(core, 24 * MiB, 16 * MiB)
        pages.period_over(alone=False)
    assert core.on(state, HBM) == 48 * MiB


def test_state_rises_again_when_there_is_room(pages: OnOneCore, core: Core) -> None:
    core.state(True)
    state = core.allocate(16 * MiB)
    core.state(False)
    pages._more(0, 64 * MiB)
    core.move(state, DRAM)
    pages.begin()
    for _ in range(PATIENCE):
        assert core.on(state, HBM) == 0
        step(core, 4 * MiB)
        unmapped = core.counts().unmaps
        pages.period_over()
    assert core.on(state, HBM) == 16 * MiB
    assert core.counts().unmaps - unmapped <= 16 * MiB // PAGE  # its own pages: nothing else was laid out anew
    assert core.counts().dram == 0  # or what it left there would be taken for what HBM has no room for
    for _ in range(2 * PATIENCE):
        step(core, 4 * MiB)
        pages.period_over()
        assert core.on(state, HBM) == 16 * MiB
        assert pages.overflow(torch.device("cuda", 0)) == 0


def test_a_block_larger_than_what_is_claimed_at_a_time_sinks_whole(
    pages: OnOneCore, core: Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("allocator.claims.STEP", PAGE)
    monkeypatch.setattr("allocator.pages.GiB", 4 * MiB)
    core.state(True)
    state = core.allocate(40 * MiB)
    core.state(False)
    pages._more(0, 8 * MiB)
    pages.begin()
    for _ in range(PATIENCE):
        step(core, 24 * MiB, 8 * MiB)
        pages.period_over()
    assert core.on(state, DRAM) == 40 * MiB


def test_gpus_share_the_dram_that_there_is(pages: OnOneCore, monkeypatch: pytest.MonkeyPatch) -> None:
    cores = [Core("memfd", hbm=0, dram=0) for _ in range(2)]
    monkeypatch.setattr(adapter, "core_of", lambda library, device: cores[device])
    monkeypatch.setattr("allocator.claims.STEP", PAGE)
    for device, core in enumerate(cores):
        assert pages._more(device, 24 * MiB)
        core.allocate(24 * MiB)
        with pytest.raises(CoreFull):
            core.allocate(PAGE)


def test_a_layout_that_has_to_wait_for_a_capture_is_made_after_it(
    pages: OnOneCore, core: Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(*foreseen: object) -> None:
        raise CoreBusy("a stream is being captured into a graph")

    pages.begin()
    step(core, 4 * MiB, 8 * MiB)
    with monkeypatch.context() as patched:
        patched.setattr(core, "plan", busy)
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
    pages.expect_news(torch.device("cuda", 0))
    step(core, 4 * MiB, 8 * MiB)  # what is under way when plans change ends as it began
    assert core.counts().planned == 4
    pages.period_over()
    step(core, 8 * MiB, 2 * MiB)
    assert (core.counts().planned, core.counts().departed) == (4, 0)
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
    pages.expect_news(torch.device("cuda", 0))
    assert core.counts().hbm == mapped  # backward may still need it
    pages.expect_news(torch.device("cuda", 0), 8 * MiB, now=True)
    assert core.counts().hbm == 8 * MiB, "as much as the next one is to need"
    pages.expect_news(torch.device("cuda", 0), now=True)
    assert core.counts().hbm == 0


def test_what_was_asked_for_aside_in_a_step_without_a_layout_goes_back_at_its_end(pages: OnOneCore, core: Core) -> None:
    """Or the next step is found with what the formulas that were tried in this one had mapped: 1.66 of its need."""
    device = torch.device("cuda", 0)
    pages.begin()
    step(core, 4 * MiB, 8 * MiB)
    pages.expect_news(device)
    pages.period_over()
    with aside():
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
    pages.expect_news(torch.device("cuda", 0))
    for _ in range(3):
        pages.period_over()
        step(core, 2 * MiB, 6 * MiB)
    assert core.counts().hbm == 8 * MiB
