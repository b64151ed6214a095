"""Modules that are called, hooked, patched and left in odd ways, while all that can be is dropped and replayed."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook

from tests.scenarios import REMADE, Program, assert_same, batch, blocks, gradients, main, moving, recomputed, train
from tests.scenarios.parts import AT, STEPS, WIDTH, Part, assert_same_later


def _remade(program: Program, device: torch.device) -> None:
    """Check that it does what it does without tiers, while something of what it saves is made again."""
    assert_same(program, device, moves=False, **REMADE)
    with moving(**REMADE) as session:
        program(device)
        print(f"  dropped at {sorted(recomputed(session))}")
        assert recomputed(session), "nothing was dropped, so nothing was tested"


def _parts(device: torch.device, part: Callable[[], Part] = Part) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(part() for _ in range(3))).to(device)


def _small(device: torch.device, i: int) -> Tensor:
    return batch(device, i, rows=256, width=WIDTH)


def _backward(model: nn.Module, loss: Tensor) -> list[Tensor]:
    """The loss and its gradients."""
    model.zero_grad()
    loss.backward()
    return [loss.detach(), *gradients(model)]


# ---------------------------------------------------------------------------------- what modules are given


def containers_that_are_handed_in_are_filled_once(device: torch.device) -> None:
    """PyTorch's own kinds, and those of classes of the program's."""

    class Notes(dict[str, float]):
        pass

    class Cache:
        def __init__(self) -> None:
            self.entries = list[Tensor]()

    class Filling(Part):
        def forward(self, x: Tensor, notes: Any, *, cache: Any) -> Tensor:
            notes["parts"] = notes.get("parts", 0) + 1
            entries = cache.entries if isinstance(cache, Cache) else cache
            entries.append(x.detach().mean())
            return x + self.last(F.gelu(self.first(x) * entries[0] / len(entries))) / notes["parts"]

    def forward(notes: Callable[[], Any], cache: Callable[[], Any], model: nn.Module, x: Tensor, i: int) -> Tensor:
        given = notes(), cache()
        for part in model:
            x = part(x, given[0], cache=given[1])
        return x

    for notes, cache in ((dict, list), (Notes, Cache)):
        assert_same_later(Filling, device, forward=partial(forward, notes, cache), **REMADE)


def arguments_are_what_they_were(device: torch.device) -> None:
    """By name and by position, the same one thrice; and an evaluation in between."""

    class Named(Part):
        def forward(self, x: Tensor, other: Tensor, *, scale: Tensor, function: float, same: Tensor) -> Tensor:
            h = F.gelu(self.first(torch.tanh(x)) * scale)
            return x + self.last(h if other is x else function * h) + (h.sin() if same is x else h)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts, self.scale = nn.ModuleList(Named() for _ in range(3)), nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            for part in self.parts:
                x = part(x, x, scale=self.scale.exp(), function=2.0, same=x)
            return x

    def program(device: torch.device) -> list[Tensor]:
        torch.manual_seed(0)
        model, results = Model().to(device), list[Tensor]()
        for i in range(STEPS):
            results += _backward(model, model(_small(device, i)).square().mean())
            with torch.no_grad():
                results.append(model(_small(device, STEPS + i)))
        return results

    _remade(program, device)


def tensors_of_inference_mode_are_taken_as_they_are(device: torch.device) -> None:
    class Copies(Part):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.clone())

    def forward(model: nn.Module, x: Tensor, i: int) -> Tensor:
        with torch.inference_mode():
            x = x.sigmoid()
        made: Tensor = model(x)
        return made

    assert_same_later(Copies, device, forward=forward, **REMADE)


def weights_may_be_those_of_a_functional_call(device: torch.device) -> None:
    def program(device: torch.device) -> list[Tensor]:
        model, results = _parts(device), list[Tensor]()
        for i in range(STEPS):
            weights = {name: 2 * p.tanh() for name, p in model.named_parameters()} if i > 3 else {}
            results += _backward(model, functional_call(model, weights, (_small(device, i),)).square().mean())
        return results

    _remade(program, device)


# ----------------------------------------------------------------------------------- what modules become


def a_forward_may_be_another_one(device: torch.device) -> None:
    """Patched on its class or on the module, of another class, or wrapped and outliving its own class."""

    class Before(Part):
        pass

    plain = Before.forward

    def halved(self: Part, x: Tensor) -> Tensor:
        return Part.forward(self, x) / 2

    class Patched(Before):
        def __init__(self) -> None:
            super().__init__()
            Patched.forward = plain  # type: ignore[method-assign]

        def later(self) -> None:
            Patched.forward = halved  # type: ignore[method-assign,assignment]

    class Turning(Before):
        def later(self) -> None:
            self.__class__ = Patched  # type: ignore[assignment]
            Patched.forward = halved  # type: ignore[method-assign,assignment]

    class Wrapped(Part):
        def later(self) -> None:
            plain = self.forward
            self.forward = lambda x: plain(x) / 2  # type: ignore[method-assign]
            self.__class__ = Part  # type: ignore[assignment]

    class Unwrapped(Part):
        def __init__(self) -> None:
            super().__init__()
            self.forward = partial(halved, self)  # type: ignore[method-assign]

        def later(self) -> None:
            del self.forward

    for part in (Patched, Turning, Wrapped, Unwrapped):
        assert_same_later(part, device, **REMADE)


def what_changes_from_step_to_step_is_as_it_was_in_each(device: torch.device) -> None:
    """A probability that is scheduled, and a mode."""

    class Changing(Part):
        p = 0.0

        def between(self, x: Tensor) -> Tensor:
            return F.dropout(F.gelu(x), self.p, self.training)

    def program(device: torch.device) -> list[Tensor]:
        model, results = _parts(device, Changing), list[Tensor]()
        for i in range(24):
            for part in model:
                part.train(i % 3 > 0).p = (i // 8) / 10
            results += _backward(model, model(_small(device, i)).square().mean())
        return results

    _remade(program, device)


def hooks_are_called_once(device: torch.device) -> None:
    """Of modules, of those within, of all; also those that compute, put losses aside, and come later."""
    calls: list[str] = []

    def program(device: torch.device) -> list[Tensor]:
        calls.clear()
        aside, results, model = list[Tensor](), list[Tensor](), _parts(device)
        for part in model:
            part.register_forward_hook(lambda module, args, output: output * torch.sigmoid(output))
            part.first.register_forward_hook(lambda module, args, output: aside.append(output.square().mean()))
        with contextlib.ExitStack() as stack:
            for i in range(STEPS):
                if i == AT:
                    model[1].last.register_forward_hook(lambda *_: calls.append("within"))
                    stack.enter_context(register_module_forward_hook(lambda *_: calls.append("all")))
                loss = model(_small(device, i)).square().mean() + sum(aside)
                aside.clear()
                results += _backward(model, loss)
        return results

    _remade(program, device)
    modules = len(list(_parts(device).modules()))
    assert (calls.count("within"), calls.count("all")) == (STEPS - AT, (STEPS - AT) * modules)


def an_exception_within_a_module_changes_nothing(device: torch.device) -> None:
    """Whether the program catches it or the module itself, which goes on without."""

    class Fails(Part):
        fails = catches = False

        def between(self, x: Tensor) -> Tensor:
            try:
                h = F.gelu(x)
                if self.fails:
                    raise ArithmeticError
            except ArithmeticError:
                if not self.catches:
                    raise
                return torch.tanh(x)
            return F.dropout(h, 0.1)

    def program(device: torch.device) -> list[Tensor]:
        model, results = _parts(device, Fails), list[Tensor]()
        for i in range(16):
            model[1].fails, model[1].catches = i % 4 > 1, i % 4 == 3
            try:
                results += _backward(model, model(_small(device, i)).square().mean())
            except ArithmeticError:
                results.append(torch.rand(2))
        return results

    _remade(program, device)


def what_a_module_holds_is_not_looked_at(device: torch.device) -> None:
    """What loads all that it is asked for, answers to any name, is gone, was never made, and cannot be copied."""

    class Lazy(dict[str, float]):
        def __iter__(self) -> Any:
            raise AssertionError("it loads everything")

        values = items = keys = __len__ = __iter__

    class Answering(dict[str, Any]):
        __getattr__ = dict.__getitem__

    class Holding(Part):
        def __init__(self) -> None:
            super().__init__()
            self.lazy, self.answers = Lazy(scale=0.5), Answering(scale=0.5)
            self.held = [weakref.proxy(Part()), nn.Module.__new__(nn.Module), np.array([lambda x: x], dtype=object)]

        def between(self, x: Tensor) -> Tensor:
            return F.gelu(x) * self.lazy["scale"] * self.answers.scale

    assert_same_later(Holding, device, **REMADE)


# ------------------------------------------------------------------------------------- models and others


def a_model_is_freed_with_its_last_reference_and_another_may_come(device: torch.device) -> None:
    with moving(**REMADE) as session:
        for _ in range(2):
            model = blocks(device)
            train(model, device, steps=12)
            assert recomputed(session)
            layers = weakref.ref(model[1].layers)
            gc.collect()
            gc.disable()
            try:
                del model
                assert layers() is None, "something holds it"
            finally:
                gc.enable()


def two_threads_at_once_have_their_own(device: torch.device) -> None:
    def program(device: torch.device) -> list[Tensor]:
        barrier, models = threading.Barrier(2), [_parts(device) for _ in range(2)]

        def work(model: nn.Module) -> list[Tensor]:
            barrier.wait()
            return train(model, device, steps=STEPS, loss_of=lambda model, x: model(x.view(-1, WIDTH)).square().mean())

        with ThreadPoolExecutor(2) as pool:
            return [result for results in pool.map(work, models) for result in results]

    assert_same(program, device, moves=False, **REMADE)


def operators_in_which_other_ranks_take_part_run_once(device: torch.device) -> None:
    """Each rank plans for itself: what one makes again the others would not join."""

    class Reduces(Part):
        def between(self, x: Tensor) -> Tensor:
            y = torch.sigmoid(x.detach())
            dist.all_reduce(y)
            return F.gelu(x * y)

    def program(device: torch.device) -> list[Tensor]:
        group, model, results = dist.group.WORLD, _parts(device, Reduces), list[Tensor]()
        assert group is not None
        before = group._get_sequence_number_for_group()
        for i in range(STEPS):
            results += _backward(model, model(_small(device, i)).square().mean())
        return [*results, torch.tensor(group._get_sequence_number_for_group() - before)]

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        _remade(program, device)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main("odd_modules")
