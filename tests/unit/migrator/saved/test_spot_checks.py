"""What is dropped is compared now and then with what is made in its place."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from tests.scenarios import REMADE, gradients, moving, new_objects
from torch_tiers.migrator.recompute import verified
from torch_tiers.migrator.recompute.replays import Replay
from torch_tiers.migrator.saved import spot_checks
from torch_tiers.migrator.saved.dropped import Dropped
from torch_tiers.migrator.saved.spot_checks import Checks
from torch_tiers.migrator.streams.host import HostCompute
from torch_tiers.migrator.telemetry.counters import Counters


def step(model: nn.Module, i: int) -> list[Tensor]:
    model.zero_grad()
    model(torch.full((64, 64), 0.1 + i / 16)).square().mean().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def built() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))


def test_a_site_at_which_another_tensor_is_made_is_not_dropped_any_more_and_that_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where a library chooses another kernel from some step on."""
    monkeypatch.setattr(spot_checks, "PART", 1e3)
    run, differs = Replay.run, False

    def another(self: Replay, values: Sequence[Tensor]) -> list[Tensor]:
        made = run(self, values)
        return [each * (1 + 1e-6) for each in made] if differs and self.names[0].startswith("gelu") else made

    monkeypatch.setattr(Replay, "run", another)
    model, plain = built(), built()
    with moving(**REMADE) as session:
        assert all(all(map(torch.equal, step(model, i % 8), step(plain, i % 8))) for i in range(40))
        differs = True
        for i in range(120):
            step(model, i % 8)
        saver = session.runtime.saver()
        assert saver is not None
        (mover,) = saver.movers.armed
        dropped = {key for plan in mover.learner.plans for key in plan.recompute}
        assert len(mover.checks.refused) == 1 and dropped and dropped.isdisjoint(mover.checks.refused)
        assert all(map(torch.equal, step(model, 3), step(plain, 3)))
    said = [
        record.getMessage() for record in caplog.records if "no longer recomputed bit for bit" in record.getMessage()
    ]
    assert len(said) == 1 and "by gelu" in said[0]


class PlannedIteration:
    """What a check makes again: the same, for ever."""

    def __init__(self, counted: list[int], seconds: float, clock: Any) -> None:
        self.nbytes, self.index = 64, 0

        def run(values: object) -> list[Tensor]:
            counted.append(len(counted))
            clock.now += seconds
            return [torch.ones(16)]

        self.replay = mock.Mock(inputs=(), names=["op"], run=run)
        self.replay.untracked = nullcontext

    def sources(self, most: int) -> list[Any]:
        return []


def test_checks_take_no_more_than_their_part_of_the_time_and_come_to_every_site(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = mock.Mock(now=0.0)
    monkeypatch.setattr(spot_checks.time, "perf_counter", lambda: clock.now)
    looked, counted = Checks(HostCompute(Counters()), 0), list[int]()
    looked.on = True
    sites = [PlannedIteration(counted, 1e-3, clock) for _ in range(3)]
    checked = [0, 0, 0]
    for _ in range(3000):
        for number, made in enumerate(sites):
            before = len(counted)
            looked.look(f"net:{number}", torch.ones(16), made, mock.Mock())  # type: ignore[arg-type]
            checked[number] += len(counted) - before
        clock.now += 0.1
        assert not looked.iteration_over()
    assert 1e-3 * len(counted) <= spot_checks.PART * clock.now + 1e-3
    assert min(checked) > 0.9 * max(checked) > 100


def test_nothing_is_made_where_there_is_no_room_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    compute, counted = HostCompute(Counters()), list[int]()
    looked, clock = Checks(compute, 1000), mock.Mock(now=0.0)
    looked.on = True
    for allocated, runs in ((900, 0), (100, 1)):
        monkeypatch.setattr(compute, "allocated", lambda: allocated)  # noqa: B023
        for _ in range(3):
            looked.look("net:0", torch.ones(16), PlannedIteration(counted, 0.0, clock), mock.Mock())  # type: ignore[arg-type]
            looked.iteration_over()
        assert bool(counted) == runs


def test_where_iterations_differ_no_site_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each second backward saves something else, as of a GAN: only the first site was ever looked at."""
    monkeypatch.setattr(spot_checks, "PART", 1e9)
    clock, counted = mock.Mock(now=0.0), list[int]()
    looked, checked = Checks(HostCompute(Counters()), 0), set[str]()
    looked.on = True
    for iteration in range(40):
        for key in ("a:0", "a:1", "a:2", "a:3") if iteration % 2 else ("b:0",):
            before = len(counted)
            looked.look(key, torch.ones(16), PlannedIteration(counted, 0.0, clock), mock.Mock())  # type: ignore[arg-type]
            checked |= {key} if len(counted) > before else set()
        looked.iteration_over()
    assert checked == {"a:0", "a:1", "a:2", "a:3", "b:0"}


def test_a_check_does_not_depend_on_the_program_s_default_device(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = Checks(HostCompute(Counters()), 0)
    looked.on = True
    with torch.device("meta"):
        made = PlannedIteration([], 0.0, mock.Mock(now=0.0))
        monkeypatch.setattr(made.replay, "run", lambda values: [torch.ones(16, device="cpu")])
        looked.look("net:0", torch.ones(16, device="cpu"), made, mock.Mock())  # type: ignore[arg-type]
        assert not looked.iteration_over()
    assert not looked.refused


def test_a_shape_that_was_forgotten_is_tried_again_when_it_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verified, "MOST", 4)
    model, plain = built(), built()

    def dropped(rows: int) -> int:
        loss, expected = (each(torch.full((rows, 64), 0.1)).square().mean() for each in (model, plain))
        found = count(Dropped)
        loss.backward()
        expected.backward()
        assert all(map(torch.equal, gradients(model), gradients(plain)))
        return found

    with new_objects() as count, moving(**REMADE):
        for rows in range(40, 60):  # what comes last is remembered
            last = [dropped(rows) for _ in range(4)]
        again = [dropped(45) for _ in range(4)]
    assert again[0] < again[-1] == last[-1]
