"""A forward reads state that differs when backward begins: gradients are those of plain PyTorch, bit for bit.

In each program the state is set before forward, and set to something else before backward.
"""

from __future__ import annotations

import os
import random
import threading
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import torch_tiers as tiers
from torch_tiers.migrator.controller.learner import Learner

STEPS = 10
Scale = Callable[[], float]
Change = Callable[[float], object]


@dataclass(slots=True)
class Slots:
    """An object without a `__dict__`."""

    scale: float = 1.0


class Helper:
    """An object of the program's whose property and method read what its owner does not hold."""

    source = types.SimpleNamespace(scale=1.0)

    @property
    def scale(self) -> float:
        return self.source.scale

    def of(self) -> float:
        return self.source.scale


def module_attribute() -> tuple[Scale, Change]:
    other = types.ModuleType("other")
    return lambda: other.scale, lambda value: setattr(other, "scale", value)


def function_of_another_module() -> tuple[Scale, Change]:
    other = types.ModuleType("other")
    exec("scale = 1.0\ndef read():\n    return scale", other.__dict__)
    return lambda: other.read(), lambda value: setattr(other, "scale", value)


def generator_of_another_module() -> tuple[Scale, Change]:
    other = types.ModuleType("other")
    other.rng = random.Random(0)
    return lambda: 1 + other.rng.random(), lambda value: None


def torch_generator_elsewhere() -> tuple[Scale, Change]:
    other = types.ModuleType("other")
    other.rng = torch.Generator().manual_seed(0)
    return lambda: 1 + torch.rand((), generator=other.rng).item(), lambda value: None


def slots() -> tuple[Scale, Change]:
    held = types.SimpleNamespace(deep=types.SimpleNamespace(slots=Slots()))
    return lambda: held.deep.slots.scale, lambda value: setattr(held.deep.slots, "scale", value)


def thread_local() -> tuple[Scale, Change]:
    local = threading.local()
    return lambda: local.scale, lambda value: setattr(local, "scale", value)


def nested_namespace() -> tuple[Scale, Change]:
    config = types.SimpleNamespace(model=types.SimpleNamespace(lora=types.SimpleNamespace(scale=1.0)))
    return lambda: config.model.lora.scale, lambda value: setattr(config.model.lora, "scale", value)


def closure() -> tuple[Scale, Change]:
    scale = 1.0

    def change(value: float) -> None:
        nonlocal scale
        scale = value

    return lambda: scale, change


def environment() -> tuple[Scale, Change]:
    def change(value: float) -> None:
        os.environ["SCALE_OF_A_TEST"] = str(value)

    return lambda: float(os.environ["SCALE_OF_A_TEST"]), change


def helper_property() -> tuple[Scale, Change]:
    helper = Helper()
    return lambda: helper.scale, lambda value: setattr(Helper.source, "scale", value)


def helper_method() -> tuple[Scale, Change]:
    helper = Helper()
    return lambda: helper.of(), lambda value: setattr(Helper.source, "scale", value)


STATES = (
    module_attribute,
    function_of_another_module,
    generator_of_another_module,
    torch_generator_elsewhere,
    slots,
    thread_local,
    nested_namespace,
    closure,
    environment,
    helper_property,
    helper_method,
)


class Block(nn.Module):
    """A block whose forward asks for a scale."""

    def __init__(self, scale: Scale) -> None:
        super().__init__()
        self.up, self.down, self.scale = nn.Linear(64, 256), nn.Linear(256, 64), scale

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)) * self.scale())


class Noisy(nn.Module):
    """A block with RReLU, which saves its noise before it is filled."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(64, 256), nn.RReLU(0.1, 0.9), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(x)))


class Scaled(nn.GELU):
    """A class of the program's that is nearly PyTorch's."""

    def __init__(self, scale: Scale) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale()


def of_layers(scale: Scale) -> nn.Module:
    """A stack of PyTorch's own modules, but for one."""
    return nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), Scaled(scale), nn.Linear(256, 64))


def nobody() -> None:
    """Without tiers there is nobody to wait for."""


def train(
    make: Callable[[Scale], nn.Module], state: Callable[[], tuple[Scale, Change]], wait: Callable[[], None] = nobody
) -> list[str]:
    """The bits of loss and gradients, step by step."""
    torch.manual_seed(0)
    scale, change = state()
    change(2.0)
    model = nn.Sequential(*(make(scale) for _ in range(4)))
    bits = []
    for _ in range(STEPS):
        change(2.0)
        loss = model(torch.randn(512, 64)).square().mean()
        change(1.0)  # as at the end of a `with` around forward
        loss.backward()
        wait()
        grads = sum(p.grad.double().abs().sum() for p in model.parameters() if p.grad is not None)
        bits.append(f"{loss.item().hex()} {float(grads).hex()}")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 1e-3 * parameter.grad
                parameter.grad = None
    return bits


def with_plans(make: Callable[[Scale], nn.Module], state: Callable[[], tuple[Scale, Change]], policy: str) -> list[str]:
    """The same under plans of a policy, which are in force as soon as they can be."""
    with tiers.session(policy=policy, hbm="2MiB", dram="64MiB") as session:

        def learner() -> Learner:
            saver = session.runtime.saver()
            assert saver is not None
            (mover,) = saver.movers.armed
            return mover.learner

        def wait() -> None:
            while learner().planning:
                time.sleep(0.005)

        bits = train(make, state, wait)
        assert learner().plans
    return bits


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Sums are the same only in the same order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)
@pytest.mark.parametrize(
    ("make", "policy"), [(Block, "checkpoint"), (of_layers, "auto"), (of_layers, "capuchin"), (Block, "superneurons")]
)
def test_state_that_differs_in_backward_does_not_reach_gradients(
    make: Callable[[Scale], nn.Module], state: Callable[[], tuple[Scale, Change]], policy: str
) -> None:
    expected = train(make, state)
    assert with_plans(make, state, policy) == expected


@pytest.mark.parametrize("policy", ["checkpoint", "auto", "capuchin", "superneurons"])
def test_the_noise_of_rrelu_is_that_of_forward(policy: str) -> None:
    expected = train(lambda _: Noisy(), closure)
    assert with_plans(lambda _: Noisy(), closure, policy) == expected
