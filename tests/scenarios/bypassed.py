"""Modules in which the hooks need not be called: they are not, and whatever happens there is as it would be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from tests.scenarios import assert_same, batch, main, moving, train
from torch_tiers.assembly import Session
from torch_tiers.migrator.model.links import Links
from torch_tiers.migrator.model.plan import Plan
from torch_tiers.migrator.model.trace import Trace
from torch_tiers.migrator.planner.build import make_plan
from torch_tiers.migrator.saved import saver
from torch_tiers.migrator.saved.actions import Stay
from torch_tiers.migrator.streams.host import HostCompute

STEPS = 8  # the first two are recorded


class _Layer(nn.Linear):
    """Notes whether PyTorch calls anybody for what it saves."""

    def __init__(self, width: int = 128) -> None:
        super().__init__(width, width)
        self.called: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.called.append(torch._C._autograd._top_saved_tensors_default_hooks(True) is not None)
        return super().forward(x).cumsum(1) / 16


class _Part(nn.Module):
    """Saves what stays in `first`; and a GELU's output, which is made from what its own forward is given."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.last = nn.Sequential(_Layer(), _Layer()), nn.GELU(), _Layer()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.last(self.act(self.first(x)))


def _model(device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(_Part(), _Part()).to(device)


def _layers(model: nn.Module) -> list[_Layer]:
    return [module for module in model.modules() if isinstance(module, _Layer)]


@contextmanager
def _counted() -> Iterator[None]:
    """What is in use on a CPU, too, is nobody's to tell."""
    with mock.patch.object(HostCompute, "counts", True):
        yield


def _gelus_made_again(trace: Trace, budget: int, links: Links) -> Plan:
    gelus = {ident for ident, recipe in trace.recipes.items() if recipe.op.startswith("gelu")}
    return make_plan("move", trace, (), trace.saved_bytes, dropped=gelus)


@contextmanager
def _recomputing(**arguments: Any) -> Iterator[Session]:
    with _counted(), moving(plan=_gelus_made_again, **arguments) as session:
        yield session


def only_where_there_is_something_to_do_are_hooks_called(device: torch.device) -> None:
    model = _model(device)
    with _recomputing():
        train(model, device, steps=STEPS)
        called = [layer.called[-1] for layer in _layers(model)]
        for layer in _layers(model):
            assert all(layer.called[:2]), "not all was seen where it was recorded"
    assert called == [False, False, True] * 2, called  # the last of each saves what a GELU returns, to be made again


def results_are_the_same(device: torch.device) -> None:
    with _counted(), mock.patch.object(saver, "LISTENS", 3):
        assert_same(
            lambda device: train(_model(device), device, steps=STEPS), device, moves=False, plan=_gelus_made_again
        )


def now_and_then_hooks_are_called_in_all_of_them(device: torch.device) -> None:
    model = _model(device)
    with _recomputing(), mock.patch.object(saver, "LISTENS", 5):
        train(model, device, steps=24)
    called = _layers(model)[0].called[9:]
    assert called.count(True) == 3, called


def a_module_that_comes_to_save_more_is_noticed(device: torch.device) -> None:
    class Growing(_Layer):
        grown = False

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y.exp().log1p() if self.grown else y

    torch.manual_seed(0)
    model = nn.Sequential(_Part(), nn.Sequential(_Layer(), Growing()), _Part()).to(device)
    with _recomputing() as session, mock.patch.object(saver, "LISTENS", 5):
        train(model, device, steps=STEPS)
        growing: Any = model[1][1]  # type: ignore[index]
        assert not growing.called[-1], "it was to be bypassed"
        thread_s = session.runtime.saver()
        assert thread_s is not None
        (mover,) = thread_s.movers.armed
        before = mover.learner.plans
        growing.grown = True
        train(model, device, steps=12)
        assert mover.learner.plans is not before, "nobody noticed"


def the_program_s_hooks_within_see_all_that_is_theirs(device: torch.device) -> None:
    class Within(_Part):
        def __init__(self) -> None:
            super().__init__()
            self.packed = 0

        def forward(self, x: Tensor) -> Tensor:
            def pack(tensor: Tensor) -> Tensor:
                self.packed += 1
                return tensor.detach()

            with saved_tensors_hooks(pack, lambda packed: packed):
                x = self.first(x)
            return x + self.last(F.gelu(x))

    torch.manual_seed(0)
    model = nn.Sequential(_Part(), Within(), _Part()).to(device)
    within: Any = model[1]
    with _recomputing():
        train(model, device, steps=1)
        once = within.packed
        train(model, device, steps=STEPS)
        assert within.packed == once * (STEPS + 1), "somebody was called in their place"
        assert _layers(model)[-1].called[-1], "ours were not called after them"


def an_exception_within_leaves_the_hooks_as_they_were(device: torch.device) -> None:
    class Failing(_Layer):
        fails = False

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            if self.fails:
                raise RuntimeError("on purpose")
            return y

    torch.manual_seed(0)
    model = nn.Sequential(_Part(), nn.Sequential(_Layer(), Failing()), _Part()).to(device)
    failing: Any = model[1][1]  # type: ignore[index]
    with _recomputing() as session:
        train(model, device, steps=STEPS)
        assert not failing.called[-1], "it was to be bypassed"
        failing.fails = True
        with pytest.raises(RuntimeError, match="on purpose"):
            model(batch(device, 0))
        failing.fails = False
        ours = session.runtime.saver()
        assert ours is not None
        assert ours.on_top() and not ours.bypassed
        train(model, device, steps=2)
        assert [layer.called[-1] for layer in _layers(model)][-1]


def a_module_that_backward_calls_leaves_the_hooks_as_they_were(device: torch.device) -> None:
    """What is switched within a node of the graph is as before after the node: hooks were off for good."""
    model = _model(device)
    part: Any = model[0]
    with _recomputing() as session:
        train(model, device, steps=STEPS)
        ours = session.runtime.saver()
        assert ours is not None and not part.first[0].called[-1], "it was to be bypassed"
        for calls in (part.first, model):
            loss = model(
                batch(device, 0)
            ).sum()  # whose node saves nothing: no tensor was asked for when the hook comes

            def hook(grad: Tensor, calls: nn.Module = calls) -> None:
                calls(batch(device, 1))

            loss.register_hook(hook)
            loss.backward()
            assert ours.on_top() and not ours.bypassed and not ours.paused
        train(model, device, steps=2)
        assert [layer.called[-1] for layer in _layers(model)] == [False, False, True] * 2


def the_session_ends_within_one(device: torch.device) -> None:
    """Its hooks were off then, and stay so."""
    opened = _recomputing()
    session = opened.__enter__()

    class Ending(_Layer):
        ends = False

        def forward(self, x: Tensor) -> Tensor:
            if self.ends:
                session.close()
            return super().forward(x)

    torch.manual_seed(0)
    model = nn.Sequential(_Part(), nn.Sequential(_Layer(), Ending()), _Part()).to(device)
    train(model, device, steps=STEPS)
    ending: Any = model[1][1]  # type: ignore[index]
    assert not ending.called[-1], "it was to be bypassed"
    ending.ends = True
    loss = model(batch(device, 0)).square().mean()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    loss.backward()
    opened.__exit__(None, None, None)


def backward_is_known_to_begin_where_all_stays(device: torch.device) -> None:
    """Where nothing that is heard was saved, no iteration ever ended, and nothing was ever noticed again."""

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last, self.loss = _Layer(), _Layer(), nn.MSELoss()

        def forward(self, x: Tensor) -> Tensor:
            return self.loss(self.last(self.first(x)), x)

    torch.manual_seed(0)
    model = WithLoss().to(device)
    with _counted(), moving(share=0), mock.patch.object(saver, "LISTENS", 5):
        train(
            model, device, steps=17, loss_of=lambda model, x: model(x)
        )  # after more of them the hooks rest, with pages
        assert any(model.first.called[8:]), model.first.called


def an_iteration_ends_that_backward_of_what_is_heard_is_no_part_of(device: torch.device) -> None:
    """Another loss than the one that was recorded, in which backward asks for nothing that is heard."""

    class TwoLosses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last, self.loss = _Layer(), _Layer(), nn.MSELoss()

        def forward(self, x: Tensor, *, whole: bool) -> Tensor:
            y = self.first(x)
            return self.loss(self.last(y), x) if whole else self.last(y).sum()

    torch.manual_seed(0)
    model = TwoLosses().to(device)
    with _counted(), moving(share=0) as session:
        train(model, device, steps=STEPS, loss_of=lambda model, x: model(x, whole=True))
        before = session.stats()["iterations"]
        train(model, device, steps=5, loss_of=lambda model, x: model(x, whole=False))
        assert session.stats()["iterations"] >= before + 5, "there were steps"


def every_forward_of_several_before_a_step_is_an_iteration_of_its_own(device: torch.device) -> None:
    """That which ended with the first tensor that was heard lacked what had been saved before."""
    model = nn.Sequential(_Layer(), _Layer(), _Part()).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with _recomputing() as session, mock.patch.object(saver, "LISTENS", 5):
        for _ in range(STEPS):
            for i in range(4):
                model(batch(device, i)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        ours = session.runtime.saver()
        assert ours is not None
        (first, *_), trace = _layers(model), ours.movers.armed[0].learner.traces[-1]
        assert trace.sites[0].key == "Sequential.0:0"
        # The first tensor after a backward is heard, whatever iteration it is of: it ends the one before.
        assert first.called[-3:] == [True] * 3, first.called
        assert model[1].called[-8:].count(True) <= 2, "it was to be bypassed"  # type: ignore[union-attr]


def what_another_is_made_from_was_not_changed_though_nobody_heard_of_it(device: torch.device) -> None:
    """A tensor of few bytes is no site of a plan's that anybody asks about."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale: Tensor
            self.register_buffer("scale", torch.linspace(0.5, 1.5, 128))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.act, self.scaled, self.head = _Layer(), nn.Tanh(), Scaled(), nn.Linear(128, 128)

        def forward(self, x: Tensor, *, changes: bool) -> Tensor:
            x = self.scaled(self.act(self.layer(x)))
            if changes:
                with torch.no_grad():
                    self.scaled.scale.mul_(0.5)
            return self.head(x)

    def program(device: torch.device) -> list[Tensor]:
        torch.manual_seed(0)
        model, results = Net().to(device), list[Tensor]()
        for i in range(STEPS + 2):
            changes = i == STEPS
            loss = model(batch(device, i), changes=changes).square().mean()
            # Nobody asks for the gradient of what the scale was multiplied with.
            results += [loss.detach(), *torch.autograd.grad(loss, list(model.head.parameters()))]
            if changes:
                with torch.no_grad():
                    model.scaled.scale.mul_(2)
        return results

    with _counted():
        assert_same(program, device, moves=False, recompute=True, share=0)


def what_one_kind_of_iterations_needs_is_heard_in_all(device: torch.device) -> None:
    """Of two plans the one in which a tensor stays and nothing is made from it said that nobody is to be told of it."""

    class TwoKinds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.act, self.head = nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 128)
            self.other = False

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            y = self.act(h)
            return y.sum(1) + h.exp().sin().cos().sum(1) if self.other else self.head(y).sum(1)

    torch.manual_seed(0)
    model = TwoKinds().to(device)
    with _recomputing() as session:
        for i in range(40):
            model.other = i >= 12 and i % 2 == 1
            train(model, device, steps=1)
        ours = session.runtime.saver()
        assert ours is not None
        (mover,) = ours.movers.armed
        bypassed = {key for key, action in mover.actions() if isinstance(action, Stay) and action.bypass}
        assert len(mover.learner.plans) == 2
        assert "TwoKinds.first:0" in bypassed
        assert "TwoKinds.act:0" not in bypassed, "from which the first kind makes what it has dropped"


def torch_func_within_one(device: torch.device) -> None:
    """Which refuses to run under hooks, and for which ours go and come back."""

    class Functional(_Part):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            slope = torch.func.vmap(torch.func.grad(lambda row: row.square().sum()))(x.detach())
            return x + self.last(self.act(x)) + slope

    def program(device: torch.device) -> list[Tensor]:
        torch.manual_seed(0)
        return train(nn.Sequential(_Part(), Functional()).to(device), device, steps=STEPS)

    with _counted():
        assert_same(program, device, moves=False, recompute=True, share=0)


if __name__ == "__main__":
    main("bypassed")
