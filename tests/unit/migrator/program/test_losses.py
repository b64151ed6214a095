"""The losses of a program are kept as it calls `backward()`, whatever it does with them afterwards."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from torch_tiers.migrator.program.losses import Losses


@pytest.fixture
def losses() -> Iterator[Losses]:
    made = Losses()
    made.install()
    yield made
    made.uninstall()


def scalar(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(value, dtype=dtype, requires_grad=True).clone()


def optimizer() -> torch.optim.Optimizer:
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    return torch.optim.SGD([parameter])


def test_each_backward_of_a_scalar_is_kept_with_its_step(losses: Losses) -> None:
    ours = optimizer()
    for value in (1.0, 2.0):
        scalar(value).backward()
        scalar(-value).backward()
        ours.step()
    torch.autograd.backward(scalar(3.0))
    assert losses.read() == [(1, 1.0), (1, -1.0), (2, 2.0), (2, -2.0), (3, 3.0)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_bits_of_every_type_are_kept(losses: Losses, dtype: torch.dtype) -> None:
    loss = scalar(1 / 3, dtype)
    loss.backward()
    ((_, value),) = losses.read()
    assert torch.equal(torch.tensor(value, dtype=torch.float64), loss.detach().double())


def test_what_becomes_of_the_tensor_afterwards_changes_nothing(losses: Losses) -> None:
    """A running sum in the place of the loss, for one."""
    loss = scalar(1.0)
    loss.backward()
    loss.detach().add_(1)
    assert losses.read() == [(1, 1.0)]


def test_a_loss_that_is_no_number_is_kept(losses: Losses) -> None:
    scalar(math.nan).backward()
    assert math.isnan(losses.read()[0][1])


def test_a_loss_of_one_element_is_one_and_a_vector_or_several_tensors_are_none(losses: Losses) -> None:
    torch.ones(1, 1, requires_grad=True).clone().backward()
    vector = torch.ones(2, requires_grad=True).clone()
    vector.backward(torch.ones(2))
    torch.autograd.backward([scalar(5.0), scalar(6.0)])
    assert losses.read() == [(1, 1.0)]


def test_a_gradient_that_is_asked_for_and_a_backward_within_one_are_none(losses: Losses) -> None:
    parameter = torch.ones(3, requires_grad=True)
    torch.autograd.grad(parameter.sum(), parameter)
    total = checkpoint(lambda x: x.sin().sum(), parameter, use_reentrant=True)
    assert isinstance(total, Tensor)
    total.backward()
    assert [step for step, _ in losses.read()] == [1]


def test_gradients_are_what_they_are_without(losses: Losses) -> None:
    parameter = torch.ones(3, requires_grad=True)
    (parameter * 2).sum().backward()
    assert torch.equal(parameter.grad, torch.full((3,), 2.0))  # type: ignore[arg-type]


def test_no_more_are_kept_than_there_is_room_for() -> None:
    losses = Losses(most=2)
    losses.install()
    try:
        for value in range(4):
            scalar(value).backward()
    finally:
        losses.uninstall()
    assert (losses.read(), losses.count) == ([(1, 0.0), (1, 1.0)], 4)


def test_afterwards_nothing_is_kept_though_somebody_still_calls_it() -> None:
    plain = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
    losses = Losses()
    losses.install()
    ours = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
    losses.uninstall()
    assert torch.autograd._engine_run_backward is plain  # type: ignore[attr-defined]
    loss = scalar(1.0)
    ours((loss,), (torch.ones(()),), False, False, (), allow_unreachable=True, accumulate_grad=True)
    assert losses.read() == []


def test_it_is_told_once_that_a_program_trains() -> None:
    told: list[str] = []
    losses = Losses(begun=lambda: told.append("begun"))
    losses.install()
    try:
        assert told == []
        scalar(1.0).backward()
        scalar(1.0).backward()
    finally:
        losses.uninstall()
    assert told == ["begun"]


def test_what_is_compiled_is_kept_too(losses: Losses) -> None:
    compiled = torch.compile(lambda x: (x * 2).sum(), backend="eager")
    compiled(torch.ones(2, requires_grad=True)).backward()
    assert losses.read() == [(1, 4.0)]
