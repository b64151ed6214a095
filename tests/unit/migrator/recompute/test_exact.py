"""What is recomputed as a whole is PyTorch's own alone, and finds in backward what forward found, or says that not."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import MethodType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook

from tests.scenarios import batch, blocks, moving, recomputed, train
from torch_tiers.migrator.recompute.as_it_was import Snapshot
from torch_tiers.migrator.recompute.exact import is_exact

CPU = torch.device("cpu")


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Conv1d(4, 4, 1), nn.Tanh())


class Own(nn.Linear):
    """A class of the program's that has the name of one of PyTorch's."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class Weight(nn.Parameter):
    """A parameter that says itself what functions do with it."""


class Input(Tensor):
    """A tensor that does."""


def test_modules_of_pytorch_are_exact_with_plain_tensors() -> None:
    assert is_exact(layers(), [torch.ones(2, 4), nn.Parameter(torch.ones(2))])
    assert not is_exact(layers(), [torch.ones(2, 4).as_subclass(Input)])


def own_class(model: Any) -> None:
    model[0] = Own(4, 4)


def own_method(model: Any) -> None:
    model[1]._conv_forward = MethodType(lambda self, x, w, b: F.conv1d(x, w, b), model[1])


def own_parameter(model: Any) -> None:
    model[0].weight = Weight(model[0].weight.detach())


def own_attribute(model: Any) -> None:
    model[0].bias = None
    model[0].__dict__["bias"] = torch.ones(4).as_subclass(Input)


@pytest.mark.parametrize("change", (own_class, own_method, own_parameter, own_attribute))
def test_what_brings_something_of_the_program_s_is_not_exact(change: Callable[[nn.Sequential], None]) -> None:
    model = layers()
    change(model)
    assert not is_exact(model)


def test_a_class_that_the_program_put_into_pytorch_is_not_exact() -> None:
    class Linear(nn.Linear):
        def __getattr__(self, name: str) -> Any:
            return super().__getattr__(name)

    with mock.patch.object(nn, "Linear", Linear):
        assert not is_exact(nn.Sequential(nn.Linear(4, 4)))


@pytest.mark.parametrize(
    ("where", "name"),
    (
        (F, "linear"),
        (torch, "tanh"),
        (nn.Module, "__call__"),
        (nn.Linear, "forward"),
        (nn.Conv1d, "_conv_forward"),
        (nn.Sequential, "__iter__"),
        (nn.Module, "__getattr__"),
    ),
)
def test_nothing_is_exact_where_a_function_of_pytorch_s_was_replaced(where: Any, name: str) -> None:
    plain, model = getattr(where, name), layers()
    with mock.patch.object(where, name, lambda *args, **named: plain(*args, **named)):
        assert not is_exact(model)
    assert is_exact(model)


def test_what_no_forward_calls_may_be_replaced() -> None:
    """Dynamo does so by itself, at its first compilation."""
    plain = nn.Module.__setstate__
    with mock.patch.object(nn.Module, "__setstate__", lambda self, state: plain(self, state)):
        assert is_exact(layers())


# ------------------------------------------------------------------------------------------ in backward


def new_child(model: Any) -> None:
    model[2] = nn.Sigmoid()


def new_hook(model: Any) -> None:
    model[0].register_forward_hook(lambda module, args, output: output * 2)


def new_forward(model: Any) -> None:
    model[0].forward = lambda x: x


def new_class(model: Any) -> None:
    model[0].__class__ = Own


def new_data(model: Any) -> None:
    model[0].weight.data = model[0].weight.data * 2


@pytest.mark.parametrize("change", (new_child, new_hook, new_forward, new_class, new_data))
def test_backward_finds_what_was_changed_since_as_it_was_and_the_program_as_it_is(
    change: Callable[[nn.Sequential], None],
) -> None:
    model, x = layers(), torch.ones(4, 4)
    before = model(x)
    was = Snapshot(model, [x], draws=False)
    change(model)
    after = model(x)
    with was.back():
        assert torch.equal(model(x), before)
    assert torch.equal(model(x), after)
    assert not torch.equal(before, after)


def conv_data(model: Any) -> Callable[[], object]:
    """Plain backward finds the new data, where PyTorch saves the parameter itself."""
    model[1].weight.data = model[1].weight.data * 2
    return lambda: None


def method(model: Any) -> Callable[[], object]:
    patch = mock.patch.object(nn.Linear, "forward", lambda self, x: x)
    patch.start()
    return patch.stop


def global_hook(model: Any) -> Callable[[], object]:
    return register_module_forward_hook(lambda module, args, output: None).remove


@pytest.mark.parametrize("change", (conv_data, method, global_hook))
def test_backward_says_what_it_cannot_give_back_and_the_module_is_given_up(
    change: Callable[[nn.Sequential], Callable[[], object]],
) -> None:
    model, given_up = layers(), list[bool]()
    was = Snapshot(model, [], given_up.append, path="Net.0", draws=False)
    undo = change(model)
    try:
        with pytest.raises(RuntimeError, match=r"^Net\.0 cannot be recomputed.*TIERS_POLICY=flashneuron"), was.back():
            pass
    finally:
        undo()
    assert given_up == [True]


def test_generators_are_not_set_back_for_what_draws_nothing() -> None:
    """Another thread, which draws meanwhile, would get numbers that it had before."""
    numbers: list[float] = []
    was = Snapshot(layers(), [], draws=False)
    numbers.append(random.random())
    with was.back():
        numbers.append(random.random())
    assert len({*numbers, random.random()}) == 3


def test_exact_modules_are_recomputed_in_a_session_and_draw_nothing() -> None:
    """Also with our function in the place of `nn.Module.__call__`, and our forward in that of theirs."""
    with (
        mock.patch("tests.scenarios.any_module", mock.MagicMock),
        moving(regions=True, share=0) as session,
        mock.patch("torch.get_rng_state", side_effect=AssertionError("a generator was looked at")),
    ):
        model: Any = blocks(CPU)
        for block in model:
            del block.layers[-1]  # which drops some of it
        train(model, CPU)
        assert recomputed(session) == {f"Sequential.{k}.layers" for k in range(3)}
        model(batch(CPU, 9)).sum().backward()
