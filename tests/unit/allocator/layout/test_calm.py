"""Periods that are as the one before, after which nothing was done: they are passed by without a look."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.one_core import OnOneCore, step
from torch_tiers.allocator.host.ledger import Ledger
from torch_tiers.allocator.layout.kinds import REMEMBERED
from torch_tiers.allocator.layout.periods import Periods
from torch_tiers.allocator.native import Core, CoreFull
from torch_tiers.allocator.sizes import PAGE, MiB

GPU = torch.device("cuda", 0)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each look, whether nothing was done."""
    looks, look = list[bool](), Periods._look

    def looked(periods: Periods, *arguments: Any) -> bool:
        looks.append(look(periods, *arguments))
        return looks[-1]

    monkeypatch.setattr(Periods, "_look", looked)
    return looks


def calm_down(pages: OnOneCore, core: Core) -> None:
    pages.begin()
    for _ in range(5):
        step(core, 4 * MiB, 8 * MiB)
        pages.period_over()


def test_a_program_that_repeats_itself_is_not_looked_at(pages: OnOneCore, core: Core, looks: list[bool]) -> None:
    """A look takes the host 0.1 ms with cold caches, in which the device has nothing to do."""
    calm_down(pages, core)
    looks.clear()
    for _ in range(8):
        step(core, 4 * MiB, 8 * MiB)
        pages.period_over()
    assert not looks
    step(core, 4 * MiB, 10 * MiB)
    pages.period_over()
    assert looks == [False]


def test_dram_that_was_claimed_for_what_no_log_has_goes_back(
    pages: OnOneCore, core: Core, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a period that ran out of memory on another stream, and went on, the log is as ever: its claim stayed."""
    monkeypatch.setattr("torch_tiers.allocator.host.claims.STEP", PAGE)
    calm_down(pages, core)
    with pytest.raises(CoreFull):
        core.allocate(70 * MiB, stream=5)
    assert pages._full(0, 48 * MiB)
    ledger = Ledger(tmp_path / "ledger")
    assert ledger.used("dram") == 48 * MiB
    for _ in range(80):
        step(core, 4 * MiB, 8 * MiB)
        pages.period_over()
    assert ledger.used("dram") == 0


def test_news_that_come_while_another_thread_ends_its_period_are_of_the_next(
    pages: OnOneCore, core: Core, looks: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    look = Periods._look

    def then_another_thread(periods: Periods, *arguments: Any) -> bool:
        nothing_done = look(periods, *arguments)
        assert nothing_done, "it would be calm from here on"
        pages.expect_new_plans(GPU)
        return nothing_done

    pages.begin()
    step(core, 4 * MiB, 8 * MiB)
    pages.period_over()
    step(core, 4 * MiB, 8 * MiB)
    with monkeypatch.context() as patched:
        patched.setattr(Periods, "_look", then_another_thread)
        pages.period_over()
    looks.clear()
    planned = core.counts().planned
    step(core, 4 * MiB, 8 * MiB)
    pages.period_over()
    assert looks == [False]
    step(core, 4 * MiB, 8 * MiB)
    assert core.counts().planned == planned + 2, "by best fit in the period after"


@pytest.mark.parametrize("hbm", [32 * MiB, 64 * MiB])
def test_all_that_is_done_is_the_same_as_with_a_look_at_every_period(
    hbm: int, seed: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Those who count periods are told later: a program of several moods, twice."""
    monkeypatch.setattr("torch_tiers.allocator.host.claims.STEP", PAGE)
    dice = random.Random(seed)
    kinds = [[dice.choice((1, 2, 3, 4, 6, 8)) * MiB for _ in range(dice.randint(2, 4))] for _ in range(4)]
    moods = [(dice.choice((kinds[:1], kinds[:2], kinds)), dice.choice((1, 4, 40, REMEMBERED + 8))) for _ in range(24)]
    happens = ("", "evaluation", "news", "news now", "capture", "full")
    weights = (200, 2, 2, 2, 2, 2)
    periods = [(dice.choice(mood), *dice.choices(happens, weights)) for mood, count in moods for _ in range(count)]

    def run(name: str) -> tuple[list[object], int]:
        core, ledger = Core("memfd", hbm=hbm, dram=0), Ledger(tmp_path / name)
        pages = OnOneCore(core, 64 * MiB, ledger)
        look, looks, seen = Periods._look, [0], list[object]()

        def looked(periods: Periods, *arguments: Any) -> bool:
            looks[0] += 1
            return look(periods, *arguments) and name != "watchful"

        pages.begin()
        with monkeypatch.context() as patched:
            patched.setattr(Periods, "_look", looked)
            for sizes, what in periods:
                step(core, *sizes)
                if what == "capture":
                    step_in_a_pool(pages, core)
                pages.step_over()
                if what == "evaluation":
                    step(core, 24 * MiB)
                elif what == "full":
                    pages._full(0, 12 * MiB)
                elif what:
                    pages.expect_new_plans(GPU, sum(sizes), now=what == "news now")
                pages.period_over()
                seen.append((core.counts(), ledger.used("dram"), pages.spilled(GPU), pages.overflow(GPU).nbytes))
        core.close()
        return seen, looks[0]

    calm, looks = run("calm")
    watchful, looks_at_all = run("watchful")
    assert looks < looks_at_all == len(periods)
    assert calm == watchful


def step_in_a_pool(pages: OnOneCore, core: Core) -> None:
    """Of which no log tells."""
    for _ in range(2):
        try:
            core.free(core.allocate(16 * MiB, pool=1))
        except CoreFull:
            pages._full(0, 16 * MiB)
    core.retire(1)
