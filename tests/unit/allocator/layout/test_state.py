"""Optimizer state that makes room in HBM, and takes it back."""

from __future__ import annotations

import pytest
import torch

from tests.unit.one_core import OnOneCore, step
from torch_tiers.allocator.layout.residence import PATIENCE
from torch_tiers.allocator.native import DRAM, HBM, Core
from torch_tiers.allocator.pages import StateRoom
from torch_tiers.allocator.sizes import PAGE, GiB, MiB


def test_state_is_demoted_when_the_rest_does_not_fit(pages: OnOneCore, core: Core) -> None:
    core.state(True)
    state = [core.allocate(16 * MiB) for _ in range(3)]
    core.state(False)
    pages.more(64 * MiB)
    pages.begin()
    for _ in range(PATIENCE):
        step(core, 24 * MiB, 16 * MiB)
        pages.period_over()
    assert sum(core.on(block, DRAM) for block in state) >= 24 * MiB
    hot = core.allocate(24 * MiB)
    assert core.on(hot, HBM) == 24 * MiB
    core.free(hot)


def test_no_more_state_is_demoted_than_the_rest_needs() -> None:
    """With it moves what shares its pages: small blocks, and what is free. That counted as what HBM had no room for."""
    core = Core("memfd", hbm=32 * GiB, dram=0)
    pages = OnOneCore(core, 4 * GiB)
    core.state(True)
    for layer in range(600):
        core.allocate((4 + layer % 3) * MiB)
        core.allocate(64 * 1024)
    core.state(False)
    core.limit(HBM, core.counts().hbm + 64 * MiB)
    pages.more(4 * GiB)
    pages.begin()
    for _ in range(4 * PATIENCE):
        step(core, 96 * MiB, 64 * MiB)
        pages.period_over()
    assert core.glance().dram_state < 512 * MiB
    assert pages.overflow(torch.device("cuda", 0)).nbytes == 0


def test_what_is_lent_and_withheld_leaves_the_budget_as_it_was() -> None:
    pages = OnOneCore(core := Core("memfd", hbm=40 * GiB, dram=0))
    device, before = torch.device("cuda", 0), core.counts().hbm_limit
    for _ in range(3):
        pages.lend(device, 102 * MiB)
        pages.withhold(device, 50 * MiB)
        assert core.counts().hbm_limit <= before + 52 * MiB
        pages.lend(device, 0)
        pages.withhold(device, 0)
    assert core.counts().hbm_limit == before


def test_state_does_not_move_while_another_thread_trains(pages: OnOneCore, core: Core) -> None:
    """Which may launch a kernel on it between the wait for the device and the end of the move."""
    core.state(True)
    state = core.allocate(48 * MiB)
    core.state(False)
    pages.more(64 * MiB)
    pages.begin()
    for _ in range(2 * PATIENCE):
        step(core, 24 * MiB, 16 * MiB)
        pages.period_over(alone=False)
    assert core.on(state, HBM) == 48 * MiB


def test_state_is_promoted_again_when_there_is_room(pages: OnOneCore, core: Core) -> None:
    core.state(True)
    state = core.allocate(16 * MiB)
    core.state(False)
    pages.more(64 * MiB)
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
        assert pages.overflow(torch.device("cuda", 0)).nbytes == 0


def test_a_block_larger_than_what_is_claimed_at_a_time_is_demoted_whole(
    pages: OnOneCore, core: Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch_tiers.allocator.host.claims.STEP", PAGE)
    monkeypatch.setattr("torch_tiers.allocator.layout.residence.GiB", 4 * MiB)
    core.state(True)
    state = core.allocate(40 * MiB)
    core.state(False)
    pages.more(8 * MiB)
    pages.begin()
    for _ in range(PATIENCE):
        step(core, 24 * MiB, 8 * MiB)
        pages.period_over()
    assert core.on(state, DRAM) == 40 * MiB


def test_state_that_hbm_has_no_room_for_lies_in_dram_from_the_beginning(pages: OnOneCore, core: Core) -> None:
    """The forward that follows finds its room as it was, though there was more of it while the optimizer stepped."""
    pages.begin()
    step(core, 24 * MiB, 16 * MiB)
    pages.state(True, {0: StateRoom(hbm=8 * MiB, expected=48 * MiB)})
    state = [core.allocate(4 * MiB) for _ in range(12)]
    pages.state(False)
    assert sum(core.on(block, HBM) for block in state) == 8 * MiB
    assert sum(core.on(block, DRAM) for block in state) == 40 * MiB
    for _ in range(3):
        pages.period_over()
        hot = [core.allocate(24 * MiB), core.allocate(16 * MiB)]
        assert all(core.on(block, DRAM) == 0 for block in hot)
        for block in hot:
            core.free(block)


def test_state_takes_the_hbm_that_is_free_where_it_is_expected_to_fit(pages: OnOneCore, core: Core) -> None:
    pages.state(True, {0: StateRoom(hbm=32 * MiB, expected=16 * MiB)})
    state = core.allocate(16 * MiB)
    assert core.on(state, HBM) == 16 * MiB
    assert core.counts().dram_limit == 0


def test_state_takes_hbm_where_dram_has_no_room_for_it(core: Core) -> None:
    pages = OnOneCore(core, dram=0)
    pages.state(True, {0: StateRoom(hbm=0, expected=16 * MiB)})
    state = core.allocate(16 * MiB)
    assert core.on(state, HBM) == 16 * MiB


def test_room_for_state_binds_the_first_step_alone(pages: OnOneCore, core: Core) -> None:
    pages.state(True, {0: StateRoom(hbm=0, expected=16 * MiB)})
    first = core.allocate(4 * MiB)
    pages.state(False)
    pages.state(True)
    assert core.on(first, DRAM) == 4 * MiB
    assert core.on(core.allocate(4 * MiB), HBM) == 4 * MiB


def test_dram_is_claimed_for_state_that_what_is_granted_does_not_hold(pages: OnOneCore, core: Core) -> None:
    """There may be an optimizer for each parameter, each of which makes its state by itself."""
    for _ in range(3):
        pages.state(True, {0: StateRoom(hbm=0, expected=4 * MiB)})
        core.allocate(1 * MiB)
        pages.state(False)
    granted = core.counts().dram_limit
    for _ in range(9):
        pages.state(True, {0: StateRoom(hbm=0, expected=4 * MiB)})
        pages.state(False)
    assert core.counts().dram_limit == granted


def test_state_for_which_dram_has_no_room_is_known(core: Core) -> None:
    pages = OnOneCore(core, dram=16 * MiB)
    room = {0: StateRoom(hbm=8 * MiB, expected=48 * MiB)}
    pages.state(True, room)
    pages.state(False)
    assert pages.state_without_room(room) == {0: 24 * MiB}
    assert pages.state_without_room({0: StateRoom(hbm=8 * MiB, expected=24 * MiB)}) == {}


def test_dram_that_is_claimed_and_not_mapped_is_released_for_others(
    pages: OnOneCore, core: Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch_tiers.allocator.host.claims.STEP", 4 * MiB)
    room = {0: StateRoom(hbm=0, expected=32 * MiB)}
    pages.state(True, room)
    core.allocate(8 * MiB)
    pages.state(False)
    assert pages.release_dram(0, 12 * MiB) == 12 * MiB
    assert pages.release_dram(0, 64 * MiB) == 12 * MiB, "what is mapped stays"
    assert core.counts().dram_limit == 8 * MiB
