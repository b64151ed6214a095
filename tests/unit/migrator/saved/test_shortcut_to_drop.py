"""What a plan drops is dropped in C++, and the same is dropped, kept and moved as by the hooks in Python."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.scenarios import moving
from tests.unit.natively import without_shortcut
from torch_tiers.migrator.recompute.replays import Replay
from torch_tiers.migrator.recompute.verified import Verified
from torch_tiers.migrator.saved.actions import Recompute
from torch_tiers.migrator.saved.dropped import Dropped
from torch_tiers.migrator.saved.mover import Mover
from torch_tiers.migrator.saved.saver import Saver

HOOKS = pytest.mark.parametrize("hooks", [nullcontext, without_shortcut], ids=["in C++", "in Python"])
Hooks = Callable[[], AbstractContextManager[None]]

STEPS = 8  # of which the first are recorded


class Block(nn.Module):
    """With parts of one projection, a view, and an activation that is its own input's neighbour."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.both, self.last = nn.LayerNorm(64), nn.Linear(64, 128), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        one, other = self.both(self.norm(x)).chunk(2, dim=-1)
        return x + self.last(F.silu(one) * other.sin()).t().sigmoid().t()


def gradients(steps: int = STEPS, rows: Callable[[int], int] = lambda i: 64, **arguments: Any) -> list[Tensor]:
    torch.manual_seed(0)
    model, all_of_them = nn.Sequential(Block(), Block()), list[Tensor]()
    with moving(**arguments):
        for i in range(steps):
            model.zero_grad()
            model(torch.full((rows(i), 64), 0.1 + i)).square().mean().backward()
            all_of_them += [one.grad.clone() for one in model.parameters() if one.grad is not None]
    return all_of_them


def test_a_plain_program_asks_python_for_nothing_that_it_drops(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    drop = Saver.drop

    def asked_for(self: Saver, tensor: Tensor, make: Recompute) -> Any:
        if not self.place.recording:
            asked.append(make.key)
        return drop(self, tensor, make)

    monkeypatch.setattr(Saver, "drop", asked_for)
    ours = gradients(recompute=True, share=0)
    assert all(map(torch.equal, ours, gradients(policy="keep")))
    # The first of a module in a new plan's first iteration goes by Python.
    assert len(asked) == len(set(asked))


@HOOKS
@pytest.mark.parametrize("share", [0, 1 / 2], ids=["of what stays", "of what moves"])
def test_gradients_are_plain_s(hooks: Hooks, share: float) -> None:
    with hooks():
        ours = gradients(recompute=True, share=share)
    assert all(map(torch.equal, ours, gradients(policy="keep")))


@HOOKS
def test_parts_of_one_tensor_are_recomputed_at_once(hooks: Hooks, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[str] = []
    run = Replay.run

    def counted(self: Replay, values: Any) -> list[Tensor]:
        runs.extend(name.partition("(")[0] for name in self.names)
        return run(self, values)

    monkeypatch.setattr(Replay, "run", counted)
    with hooks():
        torch.manual_seed(0)
        model = nn.Sequential(Block(), Block())
        with moving(recompute=True, share=0):
            for i in range(STEPS):
                runs.clear()
                model(torch.full((64, 64), 0.1 + i)).square().mean().backward()
    assert runs.count("addmm") <= 2 * 2, "of each block its first product, and its last"


@HOOKS
def test_another_version_of_a_tensor_is_another_recomputation(hooks: Hooks) -> None:
    """As of a buffer that is changed in place between two uses."""

    def gradient(**arguments: Any) -> Tensor:
        torch.manual_seed(0)
        layer = nn.Linear(64, 64)
        with moving(**arguments):
            for _ in range(STEPS):
                layer.zero_grad()
                made = layer(torch.ones(64, 64)).exp()
                first = made.detach().clone().sin_()
                second = first.clone()
                loss = (made * first).sum()
                with torch.no_grad():
                    second.mul_(2)
                loss = loss + (made * second).sum()
                loss.backward()
        assert layer.weight.grad is not None
        return layer.weight.grad

    with hooks():
        ours = gradient(recompute=True, share=0)
    assert torch.equal(ours, gradient(policy="keep"))


@HOOKS
def test_what_was_not_verified_moves(hooks: Hooks, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    take = Mover.take

    def counted(self: Mover, tensor: Tensor, key: str, *rest: Any) -> Any:
        if self.recorder is None:
            taken.append(key)
        return take(self, tensor, key, *rest)

    monkeypatch.setattr(Mover, "take", counted)
    with hooks():
        gradients(recompute=True, share=0)
        assert not taken
        monkeypatch.setattr(Verified, "find", lambda *_: None)
        ours = gradients(recompute=True, share=0)
    assert taken
    assert all(map(torch.equal, ours, gradients(policy="keep")))


@HOOKS
def test_what_is_refused_as_it_is_dropped_moves(hooks: Hooks, monkeypatch: pytest.MonkeyPatch) -> None:
    """A spot check found the recomputation to differ while the original was still there."""
    held: list[Any] = []
    drop = Mover.drop

    def seen(self: Mover, *arguments: Any) -> Any:
        held.append(drop(self, *arguments))
        return held[-1]

    monkeypatch.setattr(Mover, "drop", seen)

    def refuse(self: Any, key: str, *_: Any) -> None:
        self.refused.add(key)

    monkeypatch.setattr("torch_tiers.migrator.saved.spot_checks.Checks.look", refuse)
    with hooks():
        ours = gradients(steps=14, recompute=True, share=0)
    assert all(map(torch.equal, ours, gradients(steps=14, policy="keep")))
    assert held and not any(isinstance(one, Dropped) and one.record is None for one in held)


@HOOKS
def test_shapes_that_change_have_plain_s_gradients(hooks: Hooks) -> None:
    with hooks():
        ours = gradients(steps=30, rows=lambda i: 64 + i % 5, recompute=True, share=0)
    assert all(map(torch.equal, ours, gradients(steps=30, rows=lambda i: 64 + i % 5, policy="keep")))
