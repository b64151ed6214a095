"""What the page allocator claims of the node's DRAM, and when it gives that back."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.unit.one_core import OnOneCore, step
from torch_tiers.allocator.host.claims import UNUSED
from torch_tiers.allocator.host.dram import DramArena
from torch_tiers.allocator.host.ledger import Ledger
from torch_tiers.allocator.host.room import FRESH, Room
from torch_tiers.allocator.native import DRAM, Core, CoreError, CoreFull, Counts, off_sequence
from torch_tiers.allocator.native.pytorch import adapter
from torch_tiers.allocator.sizes import PAGE, MiB


def test_dram_is_claimed_from_the_ledger_when_hbm_is_full(pages: OnOneCore, core: Core, tmp_path: Path) -> None:
    core.allocate(60 * MiB)
    assert pages.more(16 * MiB)
    assert core.on(core.allocate(16 * MiB), DRAM) == 16 * MiB
    assert Ledger(tmp_path / "ledger").used("dram") == 64 * MiB
    assert not pages.more(16 * MiB)  # all that it may have


def test_no_more_dram_is_claimed_than_the_system_leaves(core: Core, caplog: pytest.LogCaptureFixture) -> None:
    left = 4 * MiB
    pages = OnOneCore(core, 64 * MiB, None, lambda: Room(left, "the others are many"))
    core.allocate(64 * MiB)
    assert pages.more(16 * MiB)
    assert core.on(core.allocate(4 * MiB), DRAM) == 4 * MiB
    left = 0
    time.sleep(2 * FRESH)
    assert not pages.more(16 * MiB) and not pages.more(16 * MiB)
    assert [record.getMessage() for record in caplog.records] == [
        "dram stays at 4.0 MiB of 64.0 MiB for now: the others are many"
    ]


def test_what_cannot_be_served_takes_nothing_of_the_node_s_dram(
    pages: OnOneCore, core: Core, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request of a size mistaken took all of it, from other ranks and from what moves, for good."""
    monkeypatch.setattr("torch_tiers.allocator.host.claims.STEP", PAGE)
    assert not pages._full(0, 100 << 30)
    assert Ledger(tmp_path / "ledger").used("dram") == 0
    assert pages._full(0, 48 * MiB)
    assert Ledger(tmp_path / "ledger").used("dram") == 48 * MiB


def test_where_no_dram_is_left_what_the_arena_has_idle_makes_room(
    pages: OnOneCore, core: Core, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The arena had all of it since a period was recorded, in which all moves: the program ran out of memory."""
    monkeypatch.setattr("torch_tiers.allocator.host.claims.STEP", PAGE)
    ledger = Ledger(tmp_path / "ledger")
    arena = DramArena(64 * MiB, pinned=False, step=4 * MiB, account=ledger.open_account("dram", 64 * MiB))
    blocks = [arena.allocate(4 * MiB) for _ in range(16)]
    for block in blocks[4:]:
        assert block is not None
        arena.free(block)
    pages.borrow(arena.release_idle)
    assert pages._full(0, 8 * MiB)
    assert (core.counts().dram_limit, arena.grown) == (8 * MiB, 56 * MiB)
    assert not caplog.records, "of what was had in the end"
    assert not pages.more(8 * MiB), "which a layout can do without"
    assert not pages._full(0, 60 * MiB), "the rest is in use"
    arena.close()


def test_where_the_system_leaves_nothing_the_arena_gives_back_what_others_need_besides(
    pages: OnOneCore, core: Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A little more than is kept for others was in use, for which the arena's own keeper gives nothing back."""
    monkeypatch.setattr("torch_tiers.allocator.host.claims.STEP", PAGE)
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
    monkeypatch.setattr("torch_tiers.allocator.host.claims.STEP", 4 * MiB)
    ledger = Ledger(tmp_path / "ledger")
    assert pages.more(32 * MiB)
    pages.begin()
    for _ in range(UNUSED):
        assert ledger.used("dram") == 32 * MiB
        step(core, 4 * MiB)
        pages.period_over()
    assert ledger.used("dram") == core.counts().dram_limit == 0
    assert pages.more(32 * MiB)
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


def test_nothing_is_claimed_for_requests_off_the_sequence(pages: OnOneCore, core: Core) -> None:
    with off_sequence():
        assert not pages._full(0, 4 * MiB)
        assert pages.more(4 * MiB)  # for a layout, which is made off the sequence in recorded periods


def test_gpus_share_the_dram_that_there_is(pages: OnOneCore, monkeypatch: pytest.MonkeyPatch) -> None:
    cores = [Core("memfd", hbm=0, dram=0) for _ in range(2)]
    monkeypatch.setattr(adapter, "core_of", lambda library, device: cores[device])
    monkeypatch.setattr("torch_tiers.allocator.host.claims.STEP", PAGE)
    for device, core in enumerate(cores):
        assert pages.claims.more(device, core, 24 * MiB)
        core.allocate(24 * MiB)
        with pytest.raises(CoreFull):
            core.allocate(PAGE)


def test_what_another_thread_maps_while_claims_go_back_stays_claimed(
    pages: OnOneCore, core: Core, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was mapped, and the node was told that it is free: others would take what is no longer there."""
    monkeypatch.setattr("torch_tiers.allocator.host.claims.STEP", 4 * MiB)
    ledger = Ledger(tmp_path / "ledger")
    assert pages.more(32 * MiB)
    core.allocate(64 * MiB)  # all of HBM
    counts, late = core.counts, list[int]()

    def then_another_thread() -> Counts:
        before = counts()
        if not late:
            late.append(core.allocate(16 * MiB))
        return before

    monkeypatch.setattr(core, "counts", then_another_thread)
    pages.claims.trimmed(0, core)
    assert core.on(late[0], DRAM) == 16 * MiB == ledger.used("dram") == counts().dram_limit
