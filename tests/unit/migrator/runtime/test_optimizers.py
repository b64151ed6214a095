"""Which optimizer's steps end the allocator's periods."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from migrator.runtime import optimizers
from migrator.runtime.optimizers import Optimizers


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)


def test_the_first_that_steps_leads() -> None:
    known, first, other = Optimizers(), optimizer(), optimizer()
    assert [known.stepped(one) for one in (first, other, first, other)] == [True, False, True, False]


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
    assert known.stepped(other)


def test_a_leader_that_steps_no_more_is_followed_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizers, "LEADERLESS", 3)
    known, first, other = Optimizers(), optimizer(), optimizer()
    known.stepped(first)
    assert [known.stepped(other) for _ in range(5)] == [False, False, False, True, True]
    assert not known.stepped(first)


def test_gradients_and_state_of_those_that_live_are_counted() -> None:
    model = nn.Linear(8, 8)
    known, one = Optimizers(), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    assert one not in known
    model(torch.randn(2, 8)).sum().backward()
    one.step()
    known.count(one)
    assert one in known
    assert known.nbytes == 2 * sum(parameter.nbytes for parameter in model.parameters())
