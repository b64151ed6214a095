"""Forwards whose outputs are only looked at: no backward comes, and what was recorded of them is of no use."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import torch_tiers as tiers
from torch_tiers.assembly import Session
from torch_tiers.migrator.saved.mover import Mover
from torch_tiers.migrator.saved.movers import LOOKS, UNRECORDED
from torch_tiers.migrator.saved.saver import Saver

X = torch.ones(64, 64)


@pytest.fixture
def session() -> Iterator[Session]:
    with tiers.session(policy="auto", hbm="1GiB") as session:
        yield session


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))


def saver_of(session: Session) -> Saver:
    saver = session.runtime.saver()
    assert saver is not None
    return saver


def mover_of(session: Session) -> Mover:
    (mover,) = saver_of(session).movers.armed
    return mover


def look(model: nn.Module, times: int) -> Tensor:
    """The output is held until there is the next, as by who does not care for gradients."""
    for _ in range(times):
        out: Tensor = model(X)
    return out


def test_the_program_s_time_goes_on_after_somebody_has_looked_at_what_a_node_saved(
    session: Session, model: nn.Module
) -> None:
    train(model, 1)  # not recorded, as its first forward makes what is made at first use
    saver_of(session).wake()
    out = model(X)
    assert saver_of(session).place.recording
    assert torch.equal(out.grad_fn._saved_mat1, out.grad_fn._saved_mat1)  # type: ignore[union-attr]
    time.sleep(0.3)
    out.square().mean().backward()
    train(model, 2)
    assert max(trace.seconds for trace in mover_of(session).learner.traces) > 0.25


def train(model: nn.Module, steps: int) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for _ in range(steps):
        loss = model(X).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("holds", [True, False], ids=["holds each output", "releases each output"])
def test_a_program_that_only_looks_is_not_recorded_for_ever(session: Session, model: nn.Module, holds: bool) -> None:
    """It took ten times as long, to its end."""
    for _ in range(LOOKS + 3):
        out = model(X)
        if not holds:
            del out
    assert not saver_of(session).place.recording
    assert mover_of(session).recorder is None


def test_what_it_trains_after_that_is_recorded_and_planned(session: Session, model: nn.Module) -> None:
    look(model, LOOKS + 4)
    train(model, 6)
    (trace,) = mover_of(session).learner.traces
    assert len(trace.sites) == len({site.key for site in trace.sites})
    assert all(site.uses for site in trace.sites)  # none of a forward that was looked at
    assert mover_of(session).learner.plans


def test_a_program_all_of_whose_iterations_begin_with_looks_has_plans(session: Session, model: nn.Module) -> None:
    for _ in range(UNRECORDED + 6):
        look(model, LOOKS + 4)
        train(model, 1)
    assert mover_of(session).learner.plans


def test_forwards_that_backward_goes_through_together_are_recorded_however_many(
    session: Session, model: nn.Module
) -> None:
    sum(model(X).mean() for _ in range(2 * LOOKS)).backward()  # type: ignore[union-attr]
    assert saver_of(session).place.recording


def test_backward_through_the_last_output_that_was_looked_at_is_right(model: nn.Module) -> None:
    gradients = []
    for session in (None, tiers.session(policy="auto", hbm="1GiB")):
        if session is not None:
            session.__enter__()
        try:
            look(model, 2 * LOOKS).square().mean().backward()
        finally:
            if session is not None:
                session.__exit__(None, None, None)
        gradients.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
        model.zero_grad()
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_losses_after_looks_are_those_of_the_plain_program(model: nn.Module) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    look(model, 20)
    plain = train(model, 8)
    model.load_state_dict(before)
    with tiers.session(policy="auto", hbm="1MiB", dram="64MiB"):
        look(model, 20)
        assert train(model, 8) == plain
