"""Evaluations between steps: where HBM has no room for them they are no part of a period."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.unit.one_core import OnOneCore, step
from torch_tiers.allocator.host.ledger import Ledger
from torch_tiers.allocator.layout.residence import PATIENCE
from torch_tiers.allocator.native import HBM, Core
from torch_tiers.allocator.sizes import PAGE, MiB


def test_an_evaluation_that_hbm_has_no_room_for_leaves_no_trace(pages: OnOneCore, core: Core) -> None:
    """What lay idle in DRAM after it passed for what periods have no room for: state was demoted for good."""
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
            pages.more(32 * MiB)  # as the adapter would ask
            step(core, *[4 * MiB] * 20)
            assert core.counts().dram > 0
        pages.period_over()
        assert (core.counts().dram, pages.overflow(torch.device("cuda", 0)).nbytes) == (0, 0)
        assert core.on(state, HBM) == 16 * MiB


def test_the_dram_that_an_evaluation_had_is_somebody_else_s_after_it(
    pages: OnOneCore, core: Core, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch_tiers.allocator.host.claims.STEP", PAGE)
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
    monkeypatch.setattr("torch_tiers.allocator.host.claims.STEP", PAGE)
    laid_out, set_layout = [0], core.set_layout
    monkeypatch.setattr(core, "set_layout", lambda *of: (set_layout(*of), laid_out.append(laid_out.pop() + 1)))
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


def test_a_little_that_comes_after_every_step_from_some_period_on_is_laid_out(
    pages: OnOneCore, core: Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The core's own log of such a period repeats that of the one before, which was cut: no more was planned."""
    monkeypatch.setattr("torch_tiers.allocator.host.claims.STEP", PAGE)
    pages.begin()
    for period in range(8):
        step(core, 10 * MiB, 20 * MiB)
        pages.step_over()
        if period >= 3:
            pages._full(0, 48 * MiB)
            step(core, *[24 * MiB] * 4)
        mispredicted = core.counts().mispredicted
        pages.period_over()
    step(core, 10 * MiB, 20 * MiB)
    step(core, *[24 * MiB] * 4)
    assert core.counts().mispredicted == mispredicted


def test_training_that_needs_dram_is_not_taken_for_an_evaluation(pages: OnOneCore, core: Core) -> None:
    """Whatever comes after its step: that is no larger."""
    pages.more(64 * MiB)
    pages.begin()
    for _ in range(6):
        step(core, 30 * MiB, 50 * MiB)
        pages.step_over()
        step(core, 20 * MiB)
        pages.period_over()
    assert pages.overflow(torch.device("cuda", 0)).nbytes > 0


@pytest.mark.parametrize("every", [1, 4])
def test_what_only_evaluations_take_from_the_layout_is_not_what_training_has_no_room_for(
    pages: OnOneCore, core: Core, every: int
) -> None:
    """Resting hooks were switched on again after each; but what comes after every step is the period's own."""
    pages.begin()
    overflows = set()
    for period in range(12):
        step(core, 20 * MiB, 20 * MiB)
        pages.step_over()
        if period % every == every - 1:
            core.free(core.allocate(40 * MiB, stream=7))
        pages.period_over()
        overflows.add(pages.overflow(torch.device("cuda", 0)).nbytes)
    assert overflows == ({0, 16 * MiB} if every == 1 else {0})


def test_an_evaluation_that_hbm_has_room_for_is_laid_out_with_the_rest(pages: OnOneCore, core: Core) -> None:
    """In the memory that training has: beside it there was no room the first time."""
    pages.begin()
    for period in range(12):
        step(core, 20 * MiB, 20 * MiB)
        pages.step_over()
        if period % 4 == 3:
            pages.more(32 * MiB)
            step(core, 30 * MiB, 6 * MiB)
        pages.period_over()
    assert core.counts().dram == 0
    before = core.counts().mispredicted
    step(core, 20 * MiB, 20 * MiB)
    step(core, 30 * MiB, 6 * MiB)
    assert core.counts().mispredicted == before
