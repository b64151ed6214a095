"""What backward asks for that was dropped is given back in C++ where it is made of what stays or moves."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.scenarios import moving
from tests.unit.by_hand import raising
from tests.unit.natively import without_shortcut
from torch_tiers.allocator.errors import TiersError
from torch_tiers.migrator.recompute.replays import Replay
from torch_tiers.migrator.saved.dropped import Dropped

pytestmark = pytest.mark.filterwarnings("default:.* is multi-threaded, use of fork")

STEPS = 6  # of which the first are recorded


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.last = nn.LayerNorm(64), nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.last(F.gelu(self.first(self.norm(x))))


def trained(**arguments: Any) -> tuple[list[Tensor], int]:
    """Gradients, and how many saved tensors the last plan drops."""
    torch.manual_seed(0)
    model, dropped = nn.Sequential(Block(), Block()), 0
    with moving(**arguments) as session:
        for i in range(STEPS):
            model.zero_grad()
            model(torch.full((64, 64), 1.0 + i)).square().mean().backward()
        saver = session.runtime.saver()
        assert saver is not None
        dropped = sum(len(plan.recompute) for mover in saver.movers.armed for plan in mover.learner.plans)
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None], dropped


@pytest.mark.parametrize("share", [0, 1 / 2], ids=["of what stays", "of what moves"])
def test_a_plain_program_asks_python_for_nothing_that_was_dropped(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Dropped] = []
    view = Dropped.view

    def asked_for(self: Dropped, peek: Any, *, count: bool) -> Tensor:
        if count and self.record is None:  # by backward, and not while the iteration is recorded
            asked.append(self)
        return view(self, peek, count=count)

    monkeypatch.setattr(Dropped, "view", asked_for)
    ours, dropped = trained(recompute=True, share=share)
    plain, _ = trained(policy="keep")
    assert all(map(torch.equal, ours, plain))
    assert len(asked) <= STEPS < 2 * dropped, "but for what each backward asks for first"


def test_a_view_of_what_was_dropped_is_given_back_as_a_view(monkeypatch: pytest.MonkeyPatch) -> None:
    def gradient(**arguments: Any) -> Tensor:
        torch.manual_seed(0)
        layer = nn.Linear(64, 64)
        with moving(**arguments):
            for _ in range(6):
                layer.zero_grad()
                made = layer(torch.ones(64, 64)).exp()
                (made.t()[3:, 1:].square().sum() + made.view(-1)[5:].sin().sum()).backward()
        assert layer.weight.grad is not None
        return layer.weight.grad

    plain = gradient(policy="keep")
    monkeypatch.setattr(Dropped, "view", None)
    assert torch.equal(gradient(recompute=True, share=0), plain)


def test_what_was_changed_in_place_is_an_error_as_ever() -> None:
    layer = nn.Linear(64, 64)
    with moving(recompute=True, share=0):
        for _ in range(5):
            layer(torch.ones(64, 64)).exp().sin().sum().backward()
        made = layer(torch.ones(64, 64)).exp()
        loss = made.sin().sum()
        with torch.no_grad():
            made.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_what_fails_when_it_is_made_again_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Linear(64, 64)
    with moving(recompute=True, share=0):
        for _ in range(5):
            layer(torch.ones(64, 64)).exp().sin().sum().backward()
        monkeypatch.setattr(Replay, "run", raising(RuntimeError, "no such kernel"))
        with pytest.raises(RuntimeError, match="no such kernel"):
            layer(torch.ones(64, 64)).exp().sin().sum().backward()


def test_each_value_is_looked_at_no_more_than_it_takes() -> None:
    """Where each of a layer's values is made of all before, there are 8 ** 7 ways to the first."""
    x = torch.ones(64, 64, requires_grad=True)
    with moving(recompute=True, share=0):
        for _ in range(6):
            values = [(x * k).exp() for k in range(1, 9)]
            for _ in range(6):
                total = sum(value * value for value in values)
                values = [(total * 1e-9 * k).exp() for k in range(1, 9)]
            began = time.perf_counter()
            torch.stack([value.sin().sum() for value in values]).sum().backward()
            took = time.perf_counter() - began
    assert took < 1.0


def test_a_fork_has_what_its_parent_has_or_is_told() -> None:
    """By Python, which knows: the shortcut would wait for threads that a fork does not have."""
    layer = nn.Linear(64, 64)
    with moving(recompute=True, share=1, room=0, dram="64MiB"):
        for _ in range(6):
            one, other = (layer(torch.ones(512, 64)).exp().sin().exp().sin().sum() for _ in range(2))
            one.backward()
            if (child := os.fork()) == 0:
                try:
                    other.backward()
                    os._exit(0)
                except TiersError:
                    os._exit(0)
                except BaseException:
                    os._exit(1)
            began = time.monotonic()
            while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < began + 30:
                time.sleep(0.01)
            if not ended[0]:
                os.kill(child, signal.SIGKILL)
            assert ended[0] and os.waitstatus_to_exitcode(ended[1]) == 0
            other.backward()


class Dropping(nn.Module):
    """By the operator of GPUs, which returns its mask, too."""

    def forward(self, x: Tensor) -> Tensor:
        dropped: Tensor = torch.native_dropout(x, 0.3, True)[0]
        return dropped


@pytest.mark.parametrize("hooks", [nullcontext, without_shortcut], ids=["in C++", "in Python"])
def test_a_dropout_s_result_and_mask_are_made_by_one_replay(
    hooks: Callable[[], AbstractContextManager[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[int] = []
    run = Replay.run

    def counted(self: Replay, values: Any) -> list[Tensor]:
        runs.append(sum("dropout" in name.partition("(")[0] for name in self.names))
        return run(self, values)

    def gradients(**arguments: Any) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), Dropping(), nn.Linear(64, 64))
        with hooks(), moving(**arguments):
            for _ in range(STEPS):
                model.zero_grad()
                runs.clear()
                model(torch.ones(64, 64)).square().mean().backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    monkeypatch.setattr(Replay, "run", counted)
    assert all(map(torch.equal, gradients(recompute=True, share=0), gradients(policy="keep")))
    gradients(recompute=True, share=0)
    assert [count for count in runs if count] == [2]
