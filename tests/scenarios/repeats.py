"""What backward finds when it repeats the forward of a module: as it was in forward, or the module is left alone."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.ao.quantization import FusedMovingAvgObsFakeQuantize
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from tests.scenarios import WHOLE, assert_same, batch, blocks, main, moving, recomputed, train


class _Call(nn.Module):
    """Calls a function; `self` is for it to use."""

    def __init__(self, function: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def leaves_modules_alone_whose_forward_cannot_be_repeated(device: torch.device) -> None:
    """It draws from other generators than PyTorch's own, or changes what lies outside of its attributes."""

    def draw(generator: torch.Generator) -> Callable[[nn.Module, Tensor], Tensor]:
        return lambda self, x: x * torch.rand((), generator=generator).item()

    def count(calls: list[int]) -> Callable[[nn.Module, Tensor], Tensor]:
        return lambda self, x: x / (calls.append(0) or len(calls))

    def older(generator: np.random.RandomState) -> Callable[[nn.Module, Tensor], Tensor]:
        return lambda self, x: x * generator.rand()

    def tally(calls: np.ndarray[Any, Any]) -> Callable[[nn.Module, Tensor], Tensor]:
        return lambda self, x: x / float(np.add(calls, 1, out=calls)[0])

    def number(calls: itertools.count[int]) -> Callable[[nn.Module, Tensor], Tensor]:
        return lambda self, x: x / next(calls)

    def average(mean: Tensor) -> Callable[[nn.Module, Tensor], Tensor]:
        return lambda self, x: x - mean.mul_(0.9).add_(x.detach().mean(0))

    makers: dict[str, Callable[[], Any]] = {
        "random": lambda: lambda self, x: x * random.random(),
        "NumPy": lambda: lambda self, x: x * np.random.rand(),
        "a generator": lambda: draw(torch.Generator().manual_seed(0)),
        "NumPy's older generator": lambda: older(np.random.RandomState(0)),
        "a list": lambda: count([]),
        "a list within a partial": lambda: partial(lambda calls, self, x: count(calls)(self, x), []),
        "an array": lambda: tally(np.zeros(1)),
        "an iterator": lambda: number(itertools.count(1)),
        "a tensor": lambda: average(torch.zeros(256, device=device)),
        "an observer": lambda: FusedMovingAvgObsFakeQuantize().to(device),
    }
    for name, make in makers.items():

        def program(device: torch.device, make: Any = make) -> list[Tensor]:
            random.seed(0)
            np.random.seed(0)
            model = blocks(device)
            function = make()
            for block in model:
                block.layers.insert(1, function if isinstance(function, nn.Module) else _Call(function))
            return train(model, device)

        print(f"  {name}")
        assert_same(program, device, moves=False, **WHOLE)
        with moving(**WHOLE) as session:
            program(device)
            assert not recomputed(session)


def recomputes_with_the_attributes_that_modules_had(device: torch.device) -> None:
    def count(self: Any, x: Tensor) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        return x / self.calls

    def program(device: torch.device) -> list[Tensor]:
        model = blocks(device, _Call(count))
        results = []
        for i in range(6):
            model.train()
            loss = model(batch(device, i)).square().mean()
            model.eval()  # no dropout from here on
            loss.backward()
            results += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        return [*results, torch.tensor([block.layers[1].calls for block in model])]

    assert_same(program, device, moves=False, **WHOLE)
    with moving(**WHOLE) as session:
        program(device)
        assert recomputed(session)


def recomputes_with_the_weights_of_a_functional_call(device: torch.device) -> None:
    def program(device: torch.device) -> list[Tensor]:
        model = blocks(device)
        results = train(model, device)
        for i in range(4):
            weights = {name: 2 * p.tanh() for name, p in model.named_parameters()}
            functional_call(model, weights, (batch(device, i),)).square().mean().backward()
            results += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        return results

    assert_same(program, device, moves=False, **WHOLE)


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(128, 3 * 128)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).view(8, -1, 3, 4, 32).permute(2, 0, 3, 1, 4)
        return x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)


def recomputes_with_the_attention_that_forward_was_told_to_use(device: torch.device) -> None:
    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return model(x).square().mean()

    def program(device: torch.device) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(_Attention(), _Attention(), _Attention()).to(device)
        return train(model, device, loss_of=loss_of)

    assert_same(program, device, moves=False, **WHOLE)
    with moving(**WHOLE) as session:
        program(device)
        assert recomputed(session)


def leaves_forwards_alone_whose_operations_are_intercepted(device: torch.device) -> None:
    """The mode that does so may be gone in backward."""

    class Larger(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            return 1.5 * result if function is F.linear else result

    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        with Larger():
            return model(x).square().mean()

    assert_same(lambda device: train(blocks(device), device, loss_of=loss_of), device, moves=False, **WHOLE)


class _Passing(nn.Module):
    """Hands a container on from block to block."""

    def __init__(self, container: Callable[[], Any]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Noting() for _ in range(3))
        self.container = container

    def forward(self, x: Tensor) -> Tensor:
        notes = self.container()
        for block in self.blocks:
            x = block(x, notes)
        return x


class _Noting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(128, 256), nn.Linear(256, 128)

    def forward(self, x: Tensor, notes: Any) -> Tensor:
        notes["blocks"] = notes.get("blocks", 0) + 1
        return x + self.second(torch.tanh(self.first(x))) / notes["blocks"]


def recomputes_with_the_containers_that_were_handed_in(device: torch.device) -> None:
    class Notes(dict[str, int]):
        """Of a class of the program's own nobody knows what a copy is."""

    for container in (dict, Notes):

        def program(device: torch.device, container: Any = container) -> list[Tensor]:
            torch.manual_seed(0)
            return train(_Passing(container).to(device), device, steps=12)

        assert_same(program, device, moves=False, **WHOLE)
        with moving(**WHOLE) as session:
            program(device)
            assert len(recomputed(session)) == (3 if container is dict else 0)


def refuses_a_parameter_that_changed_since_forward(device: torch.device) -> None:
    model = blocks(device)
    with moving(**WHOLE) as session:
        train(model, device)
        assert recomputed(session)
        loss = model(batch(device, 9)).sum()
        with torch.no_grad():
            model[0].layers[0].bias.add_(1)
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*TIERS_POLICY"):
            loss.backward()


def _recomputes_whole(program: Callable[[torch.device], Sequence[Tensor]], device: torch.device) -> set[str]:
    """The regions that are recomputed once `program`, which does the same with tiers as without, was learned."""
    assert_same(program, device, moves=False, **WHOLE)
    with moving(**WHOLE) as session:
        program(device)
        return recomputed(session)


class _Wide(nn.Module):
    """Two halves, each a module that would be recomputed as a whole if nothing spoke against it."""

    def __init__(self, half: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.halves = nn.ModuleList(half() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for half in self.halves:
            x = half(x)
        return x


class _Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(128, 256), nn.Linear(256, 128)

    def inner(self, x: Tensor, scale: float | Tensor = 1.0) -> Tensor:
        return x + self.last((self.first(x) * scale).tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def _trained(half: Callable[[], nn.Module]) -> Callable[[torch.device], list[Tensor]]:
    def program(device: torch.device) -> list[Tensor]:
        torch.manual_seed(0)
        return train(_Wide(half).to(device), device)

    return program


def recomputes_what_changes_nothing(device: torch.device) -> None:
    assert _recomputes_whole(_trained(_Half), device) == {"_Wide.halves.0", "_Wide.halves.1"}


def leaves_modules_alone_that_keep_a_tensor_from_call_to_call(device: torch.device) -> None:
    class Averages(_Half):
        mean: Tensor | float = 0.0

        def forward(self, x: Tensor) -> Tensor:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean()
            return self.inner(x, self.mean)

    assert not _recomputes_whole(_trained(Averages), device)


def leaves_modules_alone_that_change_their_input(device: torch.device) -> None:
    class Clamps(_Half):
        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x.relu_())

    class Given(_Wide):
        def forward(self, x: Tensor) -> Tensor:
            for half in self.halves:
                x = half(self.scale * x)
            return x

        scale = 1.5

    def program(device: torch.device) -> list[Tensor]:
        torch.manual_seed(0)
        return train(Given(Clamps).to(device), device)

    assert not _recomputes_whole(program, device)


def fills_once_what_modules_are_given(device: torch.device) -> None:
    class Cache:
        def __init__(self) -> None:
            self.entries: list[Tensor] = []

    class Fills(_Half):
        def forward(self, x: Tensor, cache: Cache | list[Tensor] | None = None) -> Tensor:
            entries = cache.entries if isinstance(cache, Cache) else cache
            assert entries is not None
            entries.append(x.detach().mean())
            return self.inner(x, 1 / len(entries))

    class Cached(_Wide):
        def __init__(self, make: Callable[[], Any], *, by_name: bool) -> None:
            super().__init__(Fills)
            self.make, self.by_name = make, by_name

        def forward(self, x: Tensor) -> Tensor:
            cache = self.make()
            for half in self.halves:
                x = half(x, cache=cache) if self.by_name else half(x, cache)
            return x

    for make in (Cache, list):  # what a cache of the program's own is nobody knows; a list can be given back
        for by_name in (True, False):

            def program(device: torch.device, make: Any = make, by_name: bool = by_name) -> list[Tensor]:
                torch.manual_seed(0)
                return train(Cached(make, by_name=by_name).to(device), device)

            assert bool(_recomputes_whole(program, device)) == (make is list)


def leaves_modules_alone_that_are_given_tensors_of_inference_mode(device: torch.device) -> None:
    class Copies(_Half):
        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x.clone())

    def features(model: nn.Module, x: Tensor) -> Tensor:
        with torch.inference_mode():
            x = x.sigmoid()
        return model(x).square().mean()

    def program(device: torch.device) -> list[Tensor]:
        torch.manual_seed(0)
        return train(_Wide(Copies).to(device), device, loss_of=features)

    assert _recomputes_whole(program, device) == {"_Wide.halves.1"}


def gives_modules_all_their_arguments_by_name(device: torch.device) -> None:
    """Also those whose names are arguments of PyTorch's checkpoint."""

    class Named(_Half):
        def forward(self, x: Tensor, *, function: float, debug: bool = True) -> Tensor:
            return self.inner(x, 1.0 if debug else function)

    class Given(_Wide):
        def forward(self, x: Tensor) -> Tensor:
            for half in self.halves:
                x = half(x, function=2.0, debug=False)
            return x

    def program(device: torch.device) -> list[Tensor]:
        torch.manual_seed(0)
        return train(Given(Named).to(device), device)

    assert _recomputes_whole(program, device)


class _Shifted(_Half):
    """Nothing that it computes needs to have its shift saved."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.full((256,), 0.3))

    def forward(self, x: Tensor, *shifts: list[Tensor], shift: Tensor | None = None) -> Tensor:
        own = shifts[0][0] if shifts else self.shift if shift is None else shift
        return x + self.last((self.first(x) + own).tanh())


class _Shifting(_Wide):
    """Changes in place what it has given its halves, when they are through."""

    def __init__(self, how: str, *, since: int = 0) -> None:
        super().__init__(_Shifted)
        self.how, self.since, self.calls = how, since, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        shift = torch.full((256,), 0.3, device=x.device)
        for half in self.halves:
            x = half(x, [shift]) if self.how == "list" else half(x, shift=shift) if self.how == "name" else half(x)
        if self.calls > self.since:
            for changed in [half.shift for half in self.halves] if self.how == "buffer" else [shift]:
                changed.mul_(0.9)
        return x


def leaves_modules_alone_whose_arguments_and_buffers_change_before_backward(device: torch.device) -> None:
    for how in ("list", "name", "buffer"):

        def program(device: torch.device, how: str = how) -> list[Tensor]:
            torch.manual_seed(0)
            return train(_Shifting(how).to(device), device)

        print(f"  {how}")
        assert not _recomputes_whole(program, device)


def refuses_arguments_and_buffers_that_begin_to_change_before_backward(device: torch.device) -> None:
    for how in ("list", "name", "buffer"):
        model = _Shifting(how, since=4).to(device)
        with moving(**WHOLE) as session:
            train(model, device)
            assert recomputed(session)
            with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*TIERS_POLICY"):
                train(model, device, steps=1)


class _Told(_Half):
    """Is told by an attribute what to compute with."""

    scale: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        assert self.scale is not None
        return self.inner(x, self.scale)


class _Telling(_Wide):
    def __init__(self, *, since: int) -> None:
        super().__init__(_Told)
        self.log_scale = nn.Parameter(torch.zeros(()))
        self.since, self.calls = since, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        scale = (self.log_scale + 0.1 * self.calls).exp()
        for half in self.halves:
            half.scale = scale
        x = super().forward(x)
        for half in self.halves:
            half.scale = None if self.calls > self.since else scale
        return x


def leaves_modules_alone_that_are_told_something_for_one_forward(device: torch.device) -> None:
    def program(device: torch.device) -> list[Tensor]:
        torch.manual_seed(0)
        return train(_Telling(since=0).to(device), device)

    assert not _recomputes_whole(program, device)


def recomputes_with_the_tensors_that_modules_had_as_attributes(device: torch.device) -> None:
    def program(device: torch.device) -> list[Tensor]:
        torch.manual_seed(0)
        return train(_Telling(since=4).to(device), device, steps=6)

    with moving(**WHOLE) as session:
        train(_Telling(since=4).to(device), device)
        assert recomputed(session)
    assert_same(program, device, moves=False, **WHOLE)


def leaves_modules_alone_in_which_other_ranks_take_part(device: torch.device) -> None:
    """Each rank plans for itself: what one repeats the others would not join."""

    class Reduces(_Half):
        def forward(self, x: Tensor) -> Tensor:
            mean = x.detach().mean()
            dist.all_reduce(mean)
            return self.inner(x, 1 + mean)

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert not _recomputes_whole(_trained(Reduces), device)
        assert _recomputes_whole(_trained(_Half), device)
    finally:
        dist.destroy_process_group()


def bears_whatever_a_forward_can_reach(device: torch.device) -> None:
    """Pairs of tensors set anew, generators without a state, dictionaries that load what they are asked for."""

    class Lazy(dict[str, int]):
        def __iter__(self) -> Any:
            raise AssertionError("it loads everything")

        values = items = keys = __len__ = __iter__

    system, lazy, seen = random.SystemRandom(), Lazy(a=1), (torch.zeros(3), torch.zeros(2))

    class Pairs(_Half):
        def forward(self, x: Tensor) -> Tensor:
            nonlocal seen
            seen = (x.detach().mean(0), seen[0])
            return self.inner(x, lazy["a"])

    class Draws(_Half):
        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x, 1.0 if system.random() < 2 else 0.0)

    for half in (Pairs, Draws):
        assert not _recomputes_whole(_trained(half), device)


def moves_the_input_of_modules_that_cannot_be_repeated(device: torch.device) -> None:
    class Config:
        """Of a class of the program's own."""

    class Given(_Half):
        def forward(self, x: Tensor, config: Config | None) -> Tensor:
            return self.inner(x)

    class Giving(_Wide):
        def __init__(self, config: Config | None) -> None:
            super().__init__(Given)
            self.config = config

        def forward(self, x: Tensor) -> Tensor:
            for half in self.halves:
                x = half(x, self.config) * 1.0
            return x

    planned = []
    for config in (None, Config()):
        with moving() as session:
            train(Giving(config).to(device), device)
            saver = session.runtime.saver()
            assert saver is not None
            planned.append([plan.moved_bytes for mover in saver.armed_movers for plan in mover.learner.plans])
    assert planned[0] == planned[1]


if __name__ == "__main__":
    main("repeats")
