"""Which optimizer's steps end the allocator's periods."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import torch_tiers as tiers
from tests.unit.migrator.runtime.test_rest import Pages
from torch_tiers import paging
from torch_tiers.bench.watch import Watch
from torch_tiers.migrator.program import optimizers
from torch_tiers.migrator.program.optimizers import Optimizers, all_alive
from torch_tiers.migrator.streams.host import HostCompute


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)


def test_the_first_that_steps_leads() -> None:
    known, first, other = Optimizers(), optimizer(), optimizer()
    assert [known.stepped(one).leads for one in (first, other, first, other)] == [True, False, True, False]


def test_a_period_is_due_at_the_begin_and_after_each_step_of_the_leader() -> None:
    known, first, other = Optimizers(), optimizer(), optimizer()
    assert known.period_due
    known.stepped(first)
    known.period_due = False
    known.stepped(other)
    assert not known.period_due
    known.stepped(first)
    assert known.period_due


def test_when_the_leader_is_gone_the_next_that_steps_leads() -> None:
    known, first, other = Optimizers(), optimizer(), optimizer()
    known.stepped(first)
    del first
    gc.collect()  # its hooks refer to it
    assert known.stepped(other).leads


def test_a_leader_that_steps_no_more_is_followed_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizers, "LEADERLESS", 3)
    known, first, other = Optimizers(), optimizer(), optimizer()
    known.stepped(first)
    assert [known.stepped(other).leads for _ in range(5)] == [False, False, False, True, True]
    assert not known.stepped(first).leads


def test_gradients_and_state_of_those_that_live_are_counted() -> None:
    model = nn.Linear(8, 8)
    known, one = Optimizers(), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    assert one not in known
    model(torch.randn(2, 8)).sum().backward()
    one.step()
    known.count(one)
    assert one in known
    assert known.nbytes == 2 * sum(parameter.nbytes for parameter in model.parameters())


def test_of_many_optimizers_only_the_first_few_are_taken_to_end_a_period() -> None:
    """There may be one for each parameter, and each look at the allocator takes microseconds."""
    known, all_of_them = Optimizers(), [optimizer() for _ in range(100)]
    ending = []
    for one in all_of_them:
        known.stepped(one)
        ending.append(known.ending)
    assert ending == [True] * (optimizers.FEW + 1) + [False] * (99 - optimizers.FEW)
    known.period_due = False
    known.stepped(all_of_them[1])
    assert not known.ending, "another period has begun"


class Container(torch.optim.Optimizer):
    """Makes the steps of others, as that of torchtitan does, and is an optimizer itself."""

    def __init__(self, model: nn.Module) -> None:
        self.inner = [torch.optim.SGD(part.parameters(), lr=0.1) for part in model.children()]
        super().__init__(model.parameters(), {})

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for inner in self.inner:
            inner.step()


@pytest.mark.parametrize("kind", ["one", "container", "one for each parameter, within backward"])
def test_a_step_is_counted_once_whatever_number_of_optimizers_makes_it(kind: str, tmp_path: Path) -> None:
    """By the runtime, and by `tiers bench`, which watches the plain program, too."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Sequential(nn.GELU(), nn.Linear(64, 64)))
    each = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}
    one = Container(model) if kind == "container" else torch.optim.SGD(model.parameters(), lr=0.1)
    if kind.endswith("backward"):
        for parameter in each:
            parameter.register_post_accumulate_grad_hook(lambda parameter: each[parameter].step())
    watch = Watch(tmp_path)
    hooks = [register_optimizer_step_pre_hook(watch.stepping), register_optimizer_step_post_hook(watch.step)]
    with tiers.session(dram="64MiB", hbm="1GiB") as session:
        for _ in range(4):
            model(torch.randn(256, 64)).square().mean().backward()
            if not kind.endswith("backward"):
                one.step()
    for hook in hooks:
        hook.remove()
    watch.write()
    (written,) = tmp_path.iterdir()
    assert session.stats()["steps"] == json.loads(written.read_text())["steps"] == 4


def test_a_step_counts_after_one_that_an_exception_has_left() -> None:
    known, outer, inner = Optimizers(), optimizer(), optimizer()
    known.stepping(outer)
    known.stepping(inner)  # which raises
    known.stepping(outer)
    known.stepping(inner)
    assert not known.stepped(inner).counts and known.stepped(outer).counts
    known.stepping(outer)  # and this one
    del outer
    gc.collect()
    known.stepping(inner)
    assert known.stepped(inner).counts


def test_what_a_second_optimizer_takes_is_the_periods_and_what_an_evaluation_takes_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[bool | str] = []
    monkeypatch.setattr(HostCompute, "pass_by", lambda compute, *, counts: told.append(counts))
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    first, second = (torch.optim.SGD(model[k].parameters(), lr=0.1) for k in (0, 2))
    with tiers.session(dram="64MiB", hbm="1GiB"):
        for _ in range(3):
            told.append("forward")
            model(torch.randn(256, 64)).square().mean().backward()
            told.append("first")
            first.step()
            second.step()
            with torch.no_grad():
                told.append("evaluation")
                model(torch.randn(1024, 64))
    period = ["first", True, True, "evaluation"]
    assert told == ["forward", *period, *(["forward", False, *period] * 2)]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the runtime does with peaks, and the allocator is told."""
    told: list[str] = []
    peak = HostCompute.peak
    monkeypatch.setattr(HostCompute, "pass_by", lambda compute, *, counts: told.append("kept" if counts else "dropped"))
    monkeypatch.setattr(HostCompute, "peak", lambda compute, resident: told.append("read") or peak(compute, resident))
    monkeypatch.setattr(Pages, "step_over", lambda pages: told.append("step over"), raising=False)
    monkeypatch.setattr(paging, "_installed", Pages())
    return told


def test_where_optimizers_step_in_backward_no_peak_of_theirs_is_dropped(told: list[str]) -> None:
    """The period is over when the next forward begins: what was in use is read after that, and was all of it."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Sequential(nn.GELU(), nn.Linear(64, 64)))
    each = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}
    for parameter in each:
        parameter.register_post_accumulate_grad_hook(lambda parameter: each[parameter].step())
    with tiers.session(dram="64MiB", hbm="1GiB"):
        for _ in range(4):
            model(torch.randn(256, 64)).square().mean().backward()
    assert "read" in told
    assert not {"dropped", "step over"} & set(told)


def test_the_leader_s_own_step_counts_where_it_comes_last(told: list[str]) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    first, second = (torch.optim.SGD(model[k].parameters(), lr=0.1) for k in (0, 2))
    with tiers.session(dram="64MiB", hbm="1GiB"):
        for order in ((first, second), (second, first), (second, first)):
            model(torch.randn(256, 64)).square().mean().backward()
            for one in order:
                one.step()
    assert told[-4:] == ["dropped", "read", "kept", "step over"]


def test_while_hooks_rest_no_peak_is_looked_at(told: list[str]) -> None:
    """A step begins with that, while the device has nothing to do; the allocator is told of periods as ever."""
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tiers.session(policy="keep", dram="64MiB", hbm="1GiB") as session:
        for step in range(12):
            if step == 8:
                saver = session.runtime.saver()
                assert saver is not None and saver.resting
                told.clear()
            model(torch.randn(256, 64)).square().mean().backward()
            optimizer.step()
    assert told == ["step over"] * 4


def test_each_optimizer_that_is_there_is_found_also_before_it_steps_and_none_that_is_being_made() -> None:
    class Unfinished(torch.optim.SGD):
        def __init__(self) -> None:
            pass

    optimizer, unfinished = torch.optim.SGD([torch.zeros(1)]), Unfinished()
    found = all_alive()
    assert any(each is optimizer for each in found)
    assert not any(each is unfinished for each in found)
