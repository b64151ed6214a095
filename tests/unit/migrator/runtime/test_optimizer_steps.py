"""What stands before an optimizer's step: within its hooks, once, and gone without a trace."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn, optim

from torch_tiers.migrator.runtime import optimizer_steps


@pytest.fixture
def calls() -> Iterator[list[Any]]:
    made: list[Any] = []

    def run(optimizer: optim.Optimizer, step: Any) -> Any:
        made.append(optimizer)
        return step()

    optimizer_steps.install(run)
    yield made
    optimizer_steps.uninstall()


def trained() -> nn.Parameter:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    return parameter


@pytest.mark.parametrize("kind", [optim.AdamW, optim.Adam, optim.SGD])
def test_each_step_comes_once_between_the_hooks(kind: Any, calls: list[Any]) -> None:
    optimizer = kind([trained()], lr=0.1)
    order: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: order.append(f"pre {len(calls)}"))
    optimizer.register_step_post_hook(lambda *_: order.append(f"post {len(calls)}"))
    optimizer.step()
    optimizer.step()
    assert calls == [optimizer, optimizer]
    assert order == ["pre 0", "post 1", "pre 1", "post 2"]


def test_optimizers_and_schedules_that_were_made_before_are_seen(calls: list[Any]) -> None:
    optimizer_steps.uninstall()
    optimizer = optim.RMSprop([trained()], lr=0.1)
    optimizer_steps.install(lambda of, step: (calls.append(of), step())[1])
    optimizer.step()
    assert calls == [optimizer]


def test_a_schedule_sees_steps_as_ever(calls: list[Any]) -> None:
    optimizer = optim.AdamW([trained()], lr=1.0)
    schedule = optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    optimizer.step()
    schedule.step()  # warns if it has seen no step
    assert calls == [optimizer]
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_a_step_with_a_closure_is_made_as_it_comes(calls: list[Any]) -> None:
    optimizer = optim.SGD([trained()], lr=0.1)
    assert optimizer.step(lambda: torch.tensor(3.0)) == 3
    assert optimizer.step(closure=lambda: torch.tensor(4.0)) == 4
    assert calls == []


def test_sessions_one_after_the_other_leave_one_function_each_time() -> None:
    plain = optimizer_steps._without_hooks(optim.Adamax)
    for _ in range(3):
        made: list[Any] = []
        optimizer_steps.install(lambda of, step, made=made: (made.append(of), step())[1])
        optimizer = optim.Adamax([trained()])
        optimizer.step()
        optimizer_steps.uninstall()
        optimizer.step()
        assert made == [optimizer]
        assert optimizer_steps._without_hooks(optim.Adamax) is plain


@pytest.mark.usefixtures("calls")
def test_a_compiled_step_updates_once() -> None:
    parameter = trained()
    torch.compile(optim.SGD([parameter], lr=0.25).step, backend="eager")()
    assert torch.equal(parameter, torch.full((2,), 0.75))


def test_a_function_that_somebody_has_put_over_ours_makes_one_step_in_a_later_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Any] = []
    for _ in range(2):
        optimizer_steps.install(lambda of, step: (made.append(of), step())[1])
        ours = optim.Adadelta.step
        monkeypatch.setattr(optim.Adadelta, "step", lambda self, closure=None, ours=ours: ours(self, closure))
        optimizer_steps.uninstall()
    optimizer_steps.install(lambda of, step: (made.append(of), step())[1])
    optim.Adadelta([trained()]).step()
    optimizer_steps.uninstall()
    assert len(made) == 1
