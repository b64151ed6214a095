"""Programs whose state changes in forward, or between forward and backward: all that can be is dropped and replayed."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.ao.quantization import FusedMovingAvgObsFakeQuantize
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from tests.scenarios import REMADE, main
from tests.scenarios.parts import AT, WIDTH, Part, assert_same_later

Act = Callable[[Tensor], Tensor]


# ------------------------------------------------------------------------------- what forward itself changes


def _number(draw: Callable[[], float]) -> Act:
    return lambda x: x * float(draw())


def _seeded(seed: Callable[[int], object], draw: Callable[[], float]) -> Act:
    seed(0)
    return _number(draw)


def _masks(generator: torch.Generator) -> Act:
    return lambda x: x * torch.rand(x.shape, generator=generator).round().to(x.device)


def _tallied(calls: np.ndarray[Any, Any]) -> Act:
    return _number(lambda: 1 / np.add(calls, 1, out=calls)[0])


_METER = SimpleNamespace(values=[])


def _listed(calls: list[float]) -> Act:
    """Counts by a list, which may be that of the meter."""
    calls.clear()

    def act(x: Tensor) -> Tensor:
        calls.append(x.detach().square().mean().item())
        return x / len(calls)

    return act


def _hidden(norm: nn.Module) -> Act:
    norms = [norm]  # in a list, which says nothing of modules
    return lambda x: norms[0].to(x.device)(x)


def _unregistered(kept: dict[str, Tensor]) -> Act:
    def act(x: Tensor) -> Tensor:
        mean = kept.setdefault("mean", torch.zeros(WIDTH, device=x.device))
        return torch.tanh(x - mean.mul_(0.9).add_(x.detach().mean(0)))

    return act


class _Centred(nn.Module):
    """Subtracts a mean, and then changes that."""

    mean: Tensor

    def __init__(self, change: Callable[[nn.Module, Tensor], object]) -> None:
        super().__init__()
        self.change = change
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x - self.mean)
        self.change(self, x.detach().mean(0))
        return y


class _Renormalises(nn.BatchNorm1d):
    """Reads its running statistics in training, which PyTorch's own does not."""

    def forward(self, x: Tensor) -> Tensor:
        y = (x - self.running_mean) / (self.running_var + self.eps).sqrt()  # type: ignore[operator]
        with torch.no_grad():
            self.running_mean.lerp_(x.mean(0), self.momentum)  # type: ignore[union-attr,arg-type]
            self.running_var.lerp_(x.var(0), self.momentum)  # type: ignore[union-attr,arg-type]
        return y


class _Bounded(nn.Linear):
    """Changes its own weight, as layers do that keep it within a norm."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.05, 0.05)
        return super().forward(x)


_NUMBERS: dict[str, Callable[[], Act]] = {
    "random": partial(_seeded, random.seed, random.random),
    "NumPy": partial(_seeded, np.random.seed, np.random.rand),
    "a generator of Python's": lambda: _number(random.Random(1).random),
    "a generator of NumPy's": lambda: _number(np.random.default_rng(1).random),
    "an older one of NumPy's": lambda: _number(np.random.RandomState(1).rand),
    "a generator of PyTorch's": lambda: _number(partial(torch.rand, (), generator=torch.Generator().manual_seed(1))),
    "whole masks of such a one": lambda: _masks(torch.Generator().manual_seed(1)),
    "an iterator": lambda: _number(map(lambda n: 1 / n, itertools.count(1)).__next__),
    "an array": lambda: _tallied(np.zeros(1)),
    "a list": lambda: _listed([]),
    "a list within a global object": lambda: _listed(_METER.values),
}
_TENSORS: dict[str, Callable[[], Act]] = {
    "a tensor": lambda: _unregistered({}),
    "a tensor that replaces another": lambda: _Centred(
        lambda self, mean: setattr(self, "mean", 0.5 * self.mean + mean)
    ),
    "a buffer": lambda: _Centred(lambda self, mean: self.mean.mul_(0.9).add_(mean)),
    "a buffer, past its version": lambda: _Centred(lambda self, mean: self.mean.data.mul_(0.9).add_(mean)),
    "a module in a list": lambda: _hidden(nn.BatchNorm1d(WIDTH)),
    "an observer": FusedMovingAvgObsFakeQuantize,
    "statistics": lambda: nn.BatchNorm1d(WIDTH),
    "statistics that are read": lambda: _Renormalises(WIDTH),
    "a weight": lambda: _Bounded(WIDTH, WIDTH),
}


class _Acting(Part):
    """Does in between what changes some state; from the start, or later on."""

    def __init__(self, make: Callable[[], Act], *, late: bool) -> None:
        super().__init__()
        self.act, self.on = make(), not late

    def between(self, x: Tensor) -> Tensor:
        return F.gelu(self.act(x) if self.on else x * 1.0)

    def later(self) -> None:
        self.on = True

    def kept(self) -> list[Tensor]:
        with torch.no_grad():  # what it would do next tells of its state
            return [self.act(torch.ones(4, WIDTH, device=self.first.weight.device)).clone(), *self.buffers()]


def _change_once(acts: dict[str, Callable[[], Act]], device: torch.device) -> None:
    for name, make in acts.items():
        print(f"  {name}")
        for late in (False, True):
            assert_same_later(partial(_Acting, make, late=late), device, **REMADE)


def numbers_are_drawn_and_counted_once(device: torch.device) -> None:
    """Also where nothing was drawn or counted while iterations were recorded."""
    _change_once(_NUMBERS, device)


def tensors_that_forward_changes_are_changed_once(device: torch.device) -> None:
    """Statistics, codebooks, weights; also where nothing changed while iterations were recorded."""
    _change_once(_TENSORS, device)


def what_was_frozen_is_trained(device: torch.device) -> None:
    """A normalisation that is a module of the program's own, and one in a list."""

    class Frozen(Part):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.norms = _Renormalises(WIDTH), [nn.BatchNorm1d(WIDTH).eval()]
            self.eval()

        def between(self, x: Tensor) -> Tensor:
            x = self.norm(x) if self.training else x - self.norm.running_mean
            return F.gelu(self.norms[0].to(x.device)(x))

        def later(self) -> None:
            self.train()
            self.norms[0].train()

        def kept(self) -> list[Tensor]:
            return [*self.buffers(), *self.norms[0].buffers()]

    assert_same_later(Frozen, device, **REMADE)


def an_input_that_forward_changes_is_changed_once(device: torch.device) -> None:
    class Clamps(Part):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward((1.5 * x).relu_())

        def between(self, x: Tensor) -> Tensor:
            return F.gelu(x, approximate="tanh").mul_(0.5)

    assert_same_later(Clamps, device, **REMADE)


# ------------------------------------------------------------- what changes between forward and backward


def what_is_put_in_place_of_another_before_backward_is_not_found(device: torch.device) -> None:
    """Attributes of every kind, tensors among them, and the mode."""

    class Scaled(Part):
        by: Callable[[Tensor], Tensor] = staticmethod(lambda a: a)

        def __init__(self) -> None:
            super().__init__()
            self.log, self.told = nn.Parameter(torch.zeros(WIDTH)), torch.ones(())
            self.first_scale, self.scales, self.named = (1.0,), [1.0], {"scale": 1.0}
            self.array, self.thing, self.calls = np.ones(1), SimpleNamespace(scale=1.0), 0

        def between(self, x: Tensor) -> Tensor:
            self.calls += 1
            scale = self.first_scale[0] * self.scales[0] * self.named["scale"] * float(self.array[0]) / self.calls
            return F.dropout(F.gelu(x) * self.by(self.told.to(x.device) * scale * self.thing.scale), 0.1, self.training)

        def replace(self) -> None:
            self.first_scale, self.scales, self.named = (1.1,), [1.2], {"scale": 0.8}
            self.array, self.thing, self.by = np.full(1, 0.9), SimpleNamespace(scale=0.7), lambda a: a * a
            self.told = torch.full((), 3.0)

    def forward(since: int, model: nn.Module, x: Tensor, i: int) -> Tensor:
        model.train()
        for part in model:
            part.told = (part.log + 0.1 * i).exp()
        made: Tensor = model(x)
        if i >= since:
            model.eval()
            for part in model:
                part.replace()
        return made

    for since in (0, AT):
        assert_same_later(Scaled, device, forward=partial(forward, since), **REMADE)


class _Shifted(Part):
    """Adds a shift, which nothing that it computes needs to have saved."""

    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.full((256, WIDTH), 0.3))

    def forward(self, x: Tensor, *shifts: list[Tensor], shift: Tensor | None = None) -> Tensor:
        own = shifts[0][0] if shifts else self.shift if shift is None else shift
        return x + self.last(F.gelu(self.first(x) + own))


def what_is_changed_in_place_before_backward_is_as_it_was(device: torch.device) -> None:
    """Buffers, tensors that a module was given, and those that a hook hands in."""

    def forward(how: str, since: int, model: nn.Module, x: Tensor, i: int) -> Tensor:
        shift = torch.full((256, WIDTH), 0.3, device=x.device)
        for part in model:
            if how == "a hook":
                hook = part.register_forward_pre_hook(lambda _, args, named: (args, {"shift": shift}), with_kwargs=True)
            x = part(x, [shift]) if how == "a list" else part(x, shift=shift) if how == "by name" else part(x)
            if how == "a hook":
                hook.remove()
        if i >= since:
            for changed in [part.shift for part in model] if how == "a buffer" else [shift]:
                changed.mul_(0.9)
        return x

    for how in ("a list", "by name", "a hook", "a buffer"):
        print(f"  {how}")
        for since in (0, AT):
            assert_same_later(_Shifted, device, forward=partial(forward, how, since), **REMADE)


SCALE: ContextVar[float] = ContextVar("scale", default=1.0)


@contextlib.contextmanager
def _scaled(by: float) -> Iterator[None]:
    token = SCALE.set(by)
    try:
        yield
    finally:
        SCALE.reset(token)


@contextlib.contextmanager
def _precision(name: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class _Larger(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        return 1.5 * result if function is F.linear else result


def what_is_set_around_a_forward_alone_is_so_again(device: torch.device) -> None:
    """A variable of the context, a precision, which attention to use, and a mode that intercepts functions.

    On a GPU products differ with the precision; elsewhere what the module makes of them does.
    """

    class Told(Part):
        def between(self, x: Tensor) -> Tensor:
            x = x * SCALE.get() * (1.0 if torch.get_float32_matmul_precision() == "high" else 2.0)
            heads = x.view(4, 64, 4, -1).transpose(1, 2)
            return F.gelu(F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).reshape(x.shape))

    def forward(around: Callable[[], Any], model: nn.Module, x: Tensor, i: int) -> Tensor:
        with around():
            made: Tensor = model(x)
        return made

    arounds: dict[str, Callable[[], Any]] = {
        "a variable": partial(_scaled, 2.0),
        "a precision": partial(_precision, "high"),
        "an attention": partial(sdpa_kernel, SDPBackend.MATH),
        "a mode": _Larger,
    }
    for name, around in arounds.items():
        print(f"  {name}")
        assert_same_later(Told, device, forward=partial(forward, around), **REMADE)


if __name__ == "__main__":
    main("replayed")
