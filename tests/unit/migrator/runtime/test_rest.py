"""Where nothing is to be done with what is saved, PyTorch saves by itself; until HBM is full."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torch_tiers as tiers
from torch_tiers import paging
from torch_tiers.allocator.overflow import Overflow
from torch_tiers.allocator.sizes import MiB
from torch_tiers.migrator.controller.learner import Learner
from torch_tiers.migrator.controller.outcome import IterationOutcome
from torch_tiers.migrator.program import optimizers
from torch_tiers.migrator.runtime.models import BudgetTooSmall
from torch_tiers.migrator.runtime.progress import Progress
from torch_tiers.migrator.saved.device_plans import CLOSELY, DevicePlans

_top = torch._C._autograd._top_saved_tensors_default_hooks


class Pages:
    """Stands for the page-grouping allocator, of which there is none without a GPU."""

    overflowed = 0
    state_in_dram = 0
    state_in_place = 0
    lasting_overflow = 0
    uses_dram = False
    news = 0
    periods = 0
    lender: Callable[[int], int] | None = None

    def borrow(self, lender: Callable[[int], int] | None) -> None:
        self.lender = lender

    def begin(self) -> None:
        pass

    def step_over(self) -> None:
        pass

    def period_over(self, *, alone: bool = True, planning: bool = False) -> None:
        self.periods += 1

    def expect_new_plans(self, device: torch.device, peak: int = 0, *, now: bool = False) -> None:
        self.news += 1

    def state(self, on: bool, room: object = None) -> None:
        pass

    def overflow(self, device: torch.device, threads: int = 1) -> Overflow:
        return Overflow(self.overflowed // threads, self.periods)

    def is_short(self, device: torch.device) -> bool:
        return self.overflowed > 0

    def spilled(self, device: torch.device) -> bool:
        return self.overflowed > 0

    def cores(self) -> Iterator[Any]:
        return iter(())


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> Pages:
    pages = Pages()
    monkeypatch.setattr(paging, "_installed", pages)
    return pages


def program() -> Callable[[int], None]:
    """Makes so many steps."""
    model = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(steps: int) -> None:
        for _ in range(steps):
            model(torch.randn(64, 128)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    return train


def is_on() -> bool:
    return _top(True) is not None


def test_what_the_arena_has_idle_is_there_for_pages_as_long_as_the_session_lasts(pages: Pages) -> None:
    train = program()
    with tiers.session(dram="64MiB", hbm="1GiB"):
        train(1)
        assert pages.lender is not None and pages.lender(1) == 0
    assert pages.lender is None


def test_a_program_that_fits_is_left_alone_once_that_was_seen(pages: Pages) -> None:
    train = program()
    with tiers.session(dram="64MiB", hbm="1GiB") as session:
        train(CLOSELY)
        assert is_on()
        train(8)
        assert not is_on()
        before = session.stats()
        train(5)
        assert session.stats()["iterations"] == before["iterations"] + 5
    assert not pages.news


def test_the_allocator_is_told_of_plans_by_which_other_memory_is_asked_for(
    pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DevicePlans, "take_news", lambda plans: True)
    with tiers.session(dram="64MiB", hbm="1GiB"):
        program()(3)
    assert pages.news == 3


def test_when_hbm_is_full_it_is_looked_at_again(pages: Pages) -> None:
    train = program()
    with tiers.session(dram="64MiB", hbm="1GiB") as session:
        train(CLOSELY + 8)
        assert not is_on()
        pages.overflowed = MiB
        train(1)
        assert is_on()
        saver = session.runtime.saver()
        assert saver is not None
        (mover,) = saver.movers.armed
        assert mover.learner.traces  # of the iteration that was recorded at once
        pages.overflowed = 0
        train(CLOSELY + 8)
        assert not is_on()


def test_the_timeline_tells_when_hooks_rest_and_why_they_no_longer_do(pages: Pages, tmp_path: Path) -> None:
    train = program()
    with tiers.session(dram="64MiB", hbm="1GiB", run=str(tmp_path)):
        train(CLOSELY + 8)
        pages.overflowed = MiB
        train(1)
    whole = json.loads(gzip.decompress((tmp_path / "timeline.json.gz").read_bytes()))
    happened = [event["name"] for event in whole["traceEvents"] if event["ph"] == "i"]
    assert happened.index("hooks rest") < happened.index("hbm was full")
    *_, last = [event["name"] for event in whole["traceEvents"] if event.get("cat") == "iterations"]
    assert last.startswith("iterations ") and last.endswith(f" to {CLOSELY + 9}")  # of those before it nobody knew


def test_of_a_period_that_did_not_fit_the_first_of_its_iterations_tells(
    pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    told: list[tuple[int, bool]] = []

    def iteration_over(self: Learner, outcome: IterationOutcome) -> bool:
        told.append((outcome.overflow, outcome.ends_period))
        return False

    happened: list[str] = []
    monkeypatch.setattr(Learner, "iteration_over", iteration_over)
    monkeypatch.setattr(Progress, "tell_timeline", lambda _, what, **more: happened.append(what))
    pages.overflowed = MiB
    with tiers.session(dram="64MiB", hbm="1GiB"):
        for _ in range(4):
            for _ in range(3):
                model(torch.randn(64, 128)).square().mean().backward()
            optimizer.step()
    assert told == [(MiB, True), (MiB, False), (MiB, False)] * 4
    assert happened.count("hbm was full") == 4, "on the timeline, too"


def test_a_program_that_does_not_fit_whatever_is_done_is_looked_at_all_the_time(pages: Pages) -> None:
    """Or it would be recorded again and again."""
    pages.overflowed = MiB
    train = program()
    with tiers.session(dram="64MiB", hbm="1GiB"):
        train(3 * CLOSELY)
        assert is_on()


def test_nothing_rests_before_the_optimizer_s_state_was_seen(pages: Pages) -> None:
    model = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128))
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        for _ in range(8):  # micro-batches: enough for a plan within the first step
            model(torch.randn(64, 128)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    with tiers.session(policy="keep", dram="64MiB", hbm="1GiB") as session:
        for _ in range(6):
            step()
        assert not is_on()
        assert session.runtime.learned is not None
        trace, *_ = session.runtime.learned
        weights = sum(parameter.nbytes for parameter in model.parameters())
        assert max(trace.others) >= 3 * weights  # and Adam's two numbers for each


def test_a_model_that_comes_while_the_hooks_rest_is_seen() -> None:
    train, late = program(), nn.Linear(1024, 1024)
    with tiers.session(policy="keep", dram="64MiB", hbm="2MiB"):
        train(8)
        assert not is_on()
        with pytest.raises(BudgetTooSmall):
            late(torch.randn(1, 1024))


def test_a_leader_that_steps_no_more_is_followed_by_another(pages: Pages, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is still referred to, by a scheduler perhaps, and its steps end the allocator's periods."""
    monkeypatch.setattr(optimizers, "LEADERLESS", 10)
    model = nn.Linear(128, 128)
    before = torch.optim.SGD(model.parameters(), lr=0.1)
    with tiers.session(dram="64MiB", hbm="1GiB"):
        for optimizer, steps in ((before, CLOSELY + 8), (torch.optim.SGD(model.parameters(), lr=0.1), 24)):
            for _ in range(steps):
                model(torch.randn(64, 128)).square().mean().backward()
                optimizer.step()
            assert is_on() == (optimizer is not before)
            pages.overflowed = MiB


def test_hooks_of_the_program_s_own_are_not_covered(pages: Pages) -> None:
    train = program()
    with tiers.session(dram="64MiB", hbm="1GiB"):
        train(CLOSELY + 8)
        pages.overflowed = MiB
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            train(1)
        assert not is_on()  # theirs were on top to the end, and are gone
        train(1)
        assert is_on()


def test_where_full_hbm_ends_the_program_it_is_looked_at_all_the_time() -> None:
    train = program()
    with tiers.session(dram="64MiB", hbm="1GiB"):
        train(CLOSELY + 8)
        assert is_on()


def test_what_is_kept_at_any_price_is_never_looked_at_again(pages: Pages) -> None:
    train = program()
    with tiers.session(policy="keep", dram="64MiB", hbm="1GiB"):
        train(4)
        assert not is_on()
        pages.overflowed = MiB
        train(4)
        assert not is_on()
