"""What stands before an optimizer's step: within its hooks, once, and gone without a trace."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from torch_tiers.migrator.runtime import optimizer_steps


@pytest.fixture
def calls() -> Iterator[list[Any]]:
    made: list[Any] = []

    def run(optimizer: optim.Optimizer, step: Any) -> Any:
        made.append(optimizer)
        return step(optimizer)

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


def test_optimizers_that_were_made_before_are_seen(calls: list[Any]) -> None:
    optimizer_steps.uninstall()
    optimizer = optim.RMSprop([trained()], lr=0.1)
    optimizer_steps.install(lambda of, step: (calls.append(of), step(of))[1])
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
        optimizer_steps.install(lambda of, step, made=made: (made.append(of), step(of))[1])
        optimizer = optim.Adamax([trained()])
        optimizer.step()
        optimizer_steps.uninstall()
        optimizer.step()
        assert made == [optimizer]
        assert optimizer_steps._without_hooks(optim.Adamax) is plain


def test_a_compiled_step_is_pytorchs_own(calls: list[Any]) -> None:
    parameter = trained()
    optimizer = optim.SGD([parameter], lr=0.25)
    step = torch.compile(optimizer.step, backend="eager")
    step()
    assert torch.equal(parameter, torch.full((2,), 0.75))
    assert calls == []
    optimizer.step()
    assert calls == [optimizer], "what is compiled elsewhere does not count"


def test_a_step_that_compiled_code_calls_compiles_nothing_of_ours() -> None:
    def compiled() -> dict[str, int]:
        optimizer = optim.Adam([trained()], lr=0.25)

        def train(x: Tensor) -> Tensor:
            optimizer.step()
            return x + 1

        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        torch.compile(train, backend="eager")(torch.ones(2))
        return dict(torch._dynamo.utils.counters["frames"])

    plain = compiled()
    optimizer_steps.install(lambda optimizer, step: step(optimizer))
    ours = compiled()
    optimizer_steps.uninstall()
    assert ours == plain


def test_a_function_that_somebody_has_put_over_ours_makes_one_step_in_a_later_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Any] = []
    for _ in range(2):
        optimizer_steps.install(lambda of, step: (made.append(of), step(of))[1])
        ours = optim.Adadelta.step
        monkeypatch.setattr(optim.Adadelta, "step", lambda self, closure=None, ours=ours: ours(self, closure))
        optimizer_steps.uninstall()
    optimizer_steps.install(lambda of, step: (made.append(of), step(of))[1])
    optim.Adadelta([trained()]).step()
    optimizer_steps.uninstall()
    assert len(made) == 1


def test_a_function_that_somebody_has_put_before_a_step_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it says that it is: PyTorch's hooks may be within it."""
    optim.Rprop([trained()])
    hooked, seen = optim.Rprop.step, []

    @functools.wraps(hooked)
    def theirs(self: optim.Rprop, closure: Any = None) -> Any:
        seen.append("theirs")
        return hooked(self, closure)

    monkeypatch.setattr(optim.Rprop, "step", theirs)
    optimizer_steps.install(lambda of, step: (seen.append("ours"), step(of))[1])
    optimizer = optim.Rprop([trained()])
    optimizer.register_step_pre_hook(lambda *_: seen.append("hook"))
    optimizer.step()
    optimizer_steps.uninstall()
    assert seen == ["theirs", "hook"]
    assert optim.Rprop.step is theirs


def test_a_function_that_dynamo_has_put_before_a_step_stays(calls: list[Any]) -> None:
    """It does so with some optimizers when anything is compiled, and PyTorch's hooks are within it."""
    optimizer_steps.uninstall()
    optimizer = optim.ASGD([trained()])
    hooked = optim.ASGD.step
    disabled: Any = torch._dynamo.disable(hooked)
    optim.ASGD.step = disabled
    try:
        optimizer_steps.install(lambda of, step: (calls.append(of), step(of))[1])
        assert optim.ASGD.step is disabled
        optimizer.step()
        assert calls == []
    finally:
        optim.ASGD.step = hooked
