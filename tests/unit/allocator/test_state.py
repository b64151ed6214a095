"""Optimizer state that makes room in HBM, and takes it back."""

from __future__ import annotations

import pytest
import torch

from tests.unit.one_core import OnOneCore, step
from torch_tiers.allocator.native import DRAM, HBM, Core
from torch_tiers.allocator.periods import PATIENCE
from torch_tiers.allocator.sizes import PAGE, MiB


def test_state_sinks_when_the_rest_does_not_fit(pages: OnOneCore, core: Core) -> None:
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


def test_state_rises_again_when_there_is_room(pages: OnOneCore, core: Core) -> None:
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
        assert pages.overflow(torch.device("cuda", 0)) == 0


def test_a_block_larger_than_what_is_claimed_at_a_time_sinks_whole(
    pages: OnOneCore, core: Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch_tiers.allocator.claims.STEP", PAGE)
    monkeypatch.setattr("torch_tiers.allocator.periods.GiB", 4 * MiB)
    core.state(True)
    state = core.allocate(40 * MiB)
    core.state(False)
    pages.more(8 * MiB)
    pages.begin()
    for _ in range(PATIENCE):
        step(core, 24 * MiB, 8 * MiB)
        pages.period_over()
    assert core.on(state, DRAM) == 40 * MiB
