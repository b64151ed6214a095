"""A thread's place on PyTorch's stack of saved-tensor hooks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from torch_tiers.migrator.saved.stack import OnStack

_autograd = torch._C._autograd


class Counting(OnStack):
    def __init__(self) -> None:
        super().__init__()
        self.packed = 0

    def pack(self, tensor: Tensor) -> Tensor:
        self.packed += 1
        return tensor.detach()

    def unpack(self, packed: Tensor) -> Tensor:
        return packed

    def sees(self) -> bool:
        """Whether what is saved now comes here."""
        before = self.packed
        torch.ones(2, requires_grad=True).exp()
        return self.packed > before


@pytest.fixture
def hooks() -> Iterator[Counting]:
    hooks = Counting()
    hooks.push()
    yield hooks
    while _autograd._top_saved_tensors_default_hooks(True) is not None:
        _autograd._pop_saved_tensors_default_hooks()


def test_hooks_that_are_off_see_nothing(hooks: Counting) -> None:
    assert hooks.sees()
    assert hooks.take_off()
    assert not hooks.sees()
    assert not hooks.take_off()


def test_hooks_that_rest_are_off_for_good(hooks: Counting) -> None:
    assert hooks.rest() and hooks.resting
    hooks.resume()  # which only those need that were suspended
    assert hooks.rest() and not hooks.sees()


def test_hooks_below_somebody_else_s_stay_where_they_are(hooks: Counting) -> None:
    others = Counting()
    others.push()
    assert not hooks.on_top()
    assert not hooks.take_off()
    assert not hooks.rest() and not hooks.resting
    assert others.sees() and not hooks.sees()
    others.take_off()
    assert hooks.sees()


def test_suspended_hooks_come_back_once(hooks: Counting) -> None:
    hooks.suspend()
    assert not hooks.sees()
    hooks.resume()
    hooks.resume()
    assert hooks.take_off()
    assert not hooks.sees()


def test_hooks_are_bypassed_only_where_they_are_the_ones_that_would_be_called(hooks: Counting) -> None:
    others = Counting()
    others.push()
    hooks.bypass(on=True)
    assert not hooks.bypassed and others.sees()


def test_bypassed_hooks_do_not_come_back_on_top_of_somebody_else_s(hooks: Counting) -> None:
    hooks.bypass(on=True)
    others = Counting()
    others.push()
    hooks.bypass(on=False)
    assert hooks.bypassed and others.sees()
    others.take_off()
    hooks.bypass(on=False)
    assert not hooks.bypassed and hooks.sees()


def test_bypassed_hooks_are_off_until_they_are_not_which_is_not_where_hooks_are_forbidden(hooks: Counting) -> None:
    hooks.bypass(on=True)
    assert hooks.bypassed and not hooks.sees()
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        hooks.bypass(on=False)
        assert hooks.bypassed
    hooks.bypass(on=False)
    assert not hooks.bypassed and hooks.sees()


def test_hooks_that_step_aside_are_off_until_they_step_back(hooks: Counting) -> None:
    assert hooks.pause()
    assert not hooks.sees()
    assert not hooks.pause(), "a backward within a backward"
    hooks.unpause()
    hooks.unpause()
    assert hooks.sees()
    assert hooks.take_off()
    assert not hooks.sees(), "they are on the stack once"


def test_hooks_that_are_switched_off_while_they_are_aside_do_not_step_back(hooks: Counting) -> None:
    """As a session that is closed in backward, or hooks that rest after a step in it."""
    hooks.pause()
    assert hooks.rest()
    hooks.unpause()
    assert not hooks.sees()


def test_hooks_below_somebody_else_s_do_not_step_aside(hooks: Counting) -> None:
    others = Counting()
    others.push()
    assert not hooks.pause()
    hooks.unpause()
    assert others.sees()
    others.take_off()
    assert hooks.sees()


def test_hooks_that_an_interrupt_left_aside_come_back_once(hooks: Counting) -> None:
    """Ctrl-C in a notebook may come between any two lines of ours."""
    hooks.pause()
    hooks.unpause_after_interrupt()
    assert hooks.sees() and not hooks.paused
    hooks.paused = True  # they were put back, and that is not yet noted
    hooks.unpause_after_interrupt()
    assert hooks.take_off()
    assert not hooks.sees()
