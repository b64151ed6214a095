"""Programs that change once they were recorded, so that what was seen to hold holds no more: results stay the same."""

from __future__ import annotations

import contextlib
import copy
import random
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from migrator.recompute import regions
from tests.scenarios import WHOLE, assert_same, batch, gradients, main, moving, recomputed

STEPS, AT = 12, 7  # and the step from which on a program is another one
WIDTH = 64
LIGHT: dict[str, Any] = {"recompute": True, "share": 0}


class Part(nn.Module):
    """Two linear layers, and something in between."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.last(self.between(self.first(x)))

    def between(self, x: Tensor) -> Tensor:
        return F.gelu(x)

    def later(self) -> None:
        """Change."""

    def kept(self) -> list[Tensor]:
        """What it has kept of its forwards, as tensors."""
        return []


def _assert_same_later(
    part: Callable[[], Part], device: torch.device, *, forward: Callable[..., Tensor] | None = None, **arguments: Any
) -> None:
    """Check that training three of them is what it is without tiers, before and after they change."""

    def program(device: torch.device) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*(part() for _ in range(3))).to(device)
        optimizer, results = torch.optim.SGD(model.parameters(), lr=0.1), list[Tensor]()
        for i in range(STEPS):
            if i == AT:
                for each in model:
                    each.later()
            optimizer.zero_grad()
            x = batch(device, i, rows=256, width=WIDTH)
            loss = (model(x) if forward is None else forward(model, x, i)).square().mean()
            loss.backward()
            results += [loss.detach(), *gradients(model)]
            optimizer.step()
        return results + [kept.to(device) for each in model for kept in each.kept()]

    assert_same(program, device, moves=False, **arguments)


# ------------------------------------------------------------------------------------------ normalisations


class Normalised(Part):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def between(self, x: Tensor) -> Tensor:
        return F.gelu(self.norm(x))


def an_epsilon_is_the_module_s_in_every_step(device: torch.device) -> None:
    class Later(Normalised):
        def later(self) -> None:
            self.norm.eps = 1e-2

    _assert_same_later(Later, device, **LIGHT)


def a_normalisation_in_place_of_another_has_an_epsilon_of_its_own(device: torch.device) -> None:
    class Later(Normalised):
        def later(self) -> None:
            other = nn.LayerNorm(WIDTH, eps=1e-3).to(self.norm.weight.device)
            other.load_state_dict(self.norm.state_dict())
            self.norm = other

    _assert_same_later(Later, device, **LIGHT)


def two_models_of_one_class_have_epsilons_of_their_own(device: torch.device) -> None:
    def program(device: torch.device) -> list[Tensor]:
        results = []
        for epsilon in (1e-5, 1e-2):
            torch.manual_seed(0)
            model = nn.Sequential(*(Normalised() for _ in range(3))).to(device)
            for part in model:
                part.norm.eps = epsilon
            for i in range(6):
                model.zero_grad()
                model(batch(device, i, rows=256, width=WIDTH)).square().mean().backward()
                results += gradients(model)
        return results

    assert_same(program, device, moves=False, **LIGHT)


def the_innermost_module_tells_an_epsilon(device: torch.device) -> None:
    class Around(nn.Module):
        """Hands out what the normalisation has made, and has an epsilon of its own."""

        def __init__(self) -> None:
            super().__init__()
            self.norm, self.eps = nn.LayerNorm(WIDTH), 1e-5

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = self.norm(x)
            return made

    class Later(Part):
        def __init__(self) -> None:
            super().__init__()
            self.norm = Around()

        def between(self, x: Tensor) -> Tensor:
            return F.gelu(self.norm(x))

        def later(self) -> None:
            self.norm.eps = 1e-2

    _assert_same_later(Later, device, **LIGHT)


def a_bias_that_was_zero_is_not_left_out(device: torch.device) -> None:
    """It is frozen, which a node does not tell from none; a checkpoint is loaded later."""

    class Later(Part):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.GroupNorm(4, WIDTH)
            self.norm.bias.requires_grad_(False)

        def between(self, x: Tensor) -> Tensor:
            return F.gelu(self.norm(x))

        def later(self) -> None:
            with torch.no_grad():
                self.norm.bias.copy_(torch.linspace(-1, 1, WIDTH))

    _assert_same_later(Later, device, **LIGHT)


def formulas_take_the_kernels_that_forward_took(device: torch.device) -> None:
    class Convolved(Part):
        def __init__(self) -> None:
            super().__init__()
            self.over = nn.Conv1d(1, 8, 5, padding=2)

        def between(self, x: Tensor) -> Tensor:
            return F.gelu(self.over(x[:, None])).mean(1)

    def forward(model: nn.Module, x: Tensor, i: int) -> Tensor:
        torch._C._set_mkldnn_enabled(i < AT)
        try:
            with torch.backends.cudnn.flags(enabled=i < AT):
                made: Tensor = model(x)
        finally:
            torch._C._set_mkldnn_enabled(True)
        return made

    _assert_same_later(Convolved, device, forward=forward, **LIGHT)


# ------------------------------------------------------------------------------------------------- regions


class Dropping(Part):
    """Drops some of what it makes, by a generator of its own; nothing at first."""

    def __init__(self, draw: Callable[[int], Callable[[], float]]) -> None:
        super().__init__()
        self.p, self.draw = 0.0, draw(1)

    def between(self, x: Tensor) -> Tensor:
        return F.gelu(x) * (float(self.draw() > self.p) if self.p else 1.0)

    def later(self) -> None:
        self.p = 0.5


class _OfTorch:
    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self) -> float:
        return float(torch.rand((), generator=self.generator))


def a_probability_is_raised(device: torch.device) -> None:
    for draw in (_OfTorch, lambda seed: random.Random(seed).random, lambda seed: np.random.default_rng(seed).random):
        _assert_same_later(lambda draw=draw: Dropping(draw), device, **WHOLE)  # type: ignore[misc]


def a_generator_is_drawn_from_once_though_no_setting_tells(device: torch.device) -> None:
    """What the probability depends on is none of the module's own."""
    now = {"p": 0.0}

    class Drawing(Part):
        def __init__(self) -> None:
            super().__init__()
            self.generator = torch.Generator().manual_seed(1)
            self.python, self.numpy = random.Random(1), np.random.default_rng(1)
            now["p"] = 0.0

        def between(self, x: Tensor) -> Tensor:
            if now["p"] and float(torch.rand((), generator=self.generator)) > now["p"]:
                x = x * self.python.random() * float(self.numpy.random())
            return F.gelu(x)

        def later(self) -> None:
            now["p"] = 0.3

        def kept(self) -> list[Tensor]:
            return [torch.tensor([self.python.random(), float(self.numpy.random())])]

    _assert_same_later(Drawing, device, **WHOLE)


def what_a_list_is_given_is_given_once(device: torch.device) -> None:
    log = {"on": False}

    class Logging(Part):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[float] = []
            log["on"] = False

        def between(self, x: Tensor) -> Tensor:
            if log["on"]:
                self.seen.append(1.0)
                x = x / len(self.seen)
            return F.gelu(x)

        def later(self) -> None:
            log["on"] = True

        def kept(self) -> list[Tensor]:
            return [torch.tensor(self.seen)]

    _assert_same_later(Logging, device, **WHOLE)


class _Running(nn.Module):
    """A normalisation of the program's own, which keeps statistics in training."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 0.1)
        return x - self.mean


def what_was_frozen_is_trained(device: torch.device) -> None:
    """Each backward failed, as its forward had changed what it was to find again."""

    class Frozen(Part):
        def __init__(self) -> None:
            super().__init__()
            self.norm = _Running()
            self.eval()

        def between(self, x: Tensor) -> Tensor:
            return F.gelu(self.norm(x))

        def later(self) -> None:
            self.train()

        def kept(self) -> list[Tensor]:
            return [self.norm.mean]

    _assert_same_later(Frozen, device, **WHOLE)


def what_was_frozen_is_trained_where_no_module_tells(device: torch.device) -> None:
    class Hidden(Part):
        def __init__(self) -> None:
            super().__init__()
            self.norms = [nn.BatchNorm1d(WIDTH).eval()]  # in a list, which says nothing of modules

        def between(self, x: Tensor) -> Tensor:
            return F.gelu(self.norms[0].to(x.device)(x))

        def later(self) -> None:
            self.norms[0].train()

        def kept(self) -> list[Tensor]:
            return [self.norms[0].running_mean, self.norms[0].num_batches_tracked]  # type: ignore[list-item]

    _assert_same_later(Hidden, device, **WHOLE)


def a_class_has_another_forward(device: torch.device) -> None:
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

    class Other(Before):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) / 2

    class Turning(Before):
        def later(self) -> None:
            self.__class__ = Other  # type: ignore[assignment]

    _assert_same_later(Patched, device, **WHOLE)
    _assert_same_later(Turning, device, **WHOLE)


@contextlib.contextmanager
def _counting(failed: list[float]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        failed.append(1.0)
        raise


def the_end_of_a_recomputation_is_no_failure_of_the_program_s(device: torch.device) -> None:
    """PyTorch's checkpoint ends it by an exception, which a handler in the forward catches."""

    class Falling(Part):
        def forward(self, x: Tensor) -> Tensor:
            try:
                h = self.last(self.between(self.first(x)))
            except Exception:
                h = self.last(torch.tanh(self.first(x)))
            return x + h

    class Counting(Part):
        def __init__(self) -> None:
            super().__init__()
            self.failed: list[float] = []

        def forward(self, x: Tensor) -> Tensor:
            with _counting(self.failed):
                return super().forward(x) / (1 + len(self.failed))

    class Suppressing(Part):
        def forward(self, x: Tensor) -> Tensor:
            with contextlib.suppress(Exception):
                return super().forward(x)
            return x

    for part in (Falling, Counting, Suppressing):
        _assert_same_later(part, device, **WHOLE)


class _Answering(dict[str, Any]):
    """A dictionary whose entries are attributes, as many programs have one."""

    __getattr__ = dict.__getitem__


_answers = _Answering(scale=0.5)


def what_a_forward_names_may_answer_to_any_name(device: torch.device) -> None:
    class Asking(Part):
        def between(self, x: Tensor) -> Tensor:
            return F.gelu(x) * _answers.scale

    _assert_same_later(Asking, device, **WHOLE)


def what_a_module_holds_is_not_asked_what_it_is(device: torch.device) -> None:
    class Holding(Part):
        def __init__(self) -> None:
            super().__init__()
            gone = Part()
            self.held = [weakref.proxy(gone), _answers, nn.Module.__new__(nn.Module)]
            self.words = {f"word {k}": k for k in range(1000)}

    _assert_same_later(Holding, device, **WHOLE)


def a_forward_that_the_program_has_wrapped_outlives_its_class(device: torch.device) -> None:
    class Wrapped(Part):
        def later(self) -> None:
            plain = self.forward
            self.forward = lambda x: plain(x) / 2  # type: ignore[method-assign]
            self.__class__ = Part  # type: ignore[assignment]

    _assert_same_later(Wrapped, device, **WHOLE)


def what_changes_and_does_not_matter_is_recorded_anew_but_once(device: torch.device) -> None:
    """A probability that is scheduled, a flag and a name that are other ones in each step, and a mode."""

    class Changing(Part):
        p = 0.0

        def between(self, x: Tensor) -> Tensor:
            return F.dropout(F.gelu(x), self.p)

    changes: list[Callable[[Part, int], object]] = [
        lambda part, i: setattr(part, "p", (i // 8) / 10),
        lambda part, i: setattr(part, "flag", bool(i % 2)),
        lambda part, i: setattr(part, "tag", f"step {i}"),
        lambda part, i: part.train(bool(i % 2)),
    ]
    for change in changes:
        torch.manual_seed(0)
        model = nn.Sequential(*(Changing() for _ in range(3))).to(device)
        repeated = []
        with (
            moving(**WHOLE) as session,
            mock.patch.object(regions, "checkpoint", wraps=regions.checkpoint) as checkpoint,
        ):
            for i in range(40):
                for part in model:
                    change(part, i)
                before = checkpoint.call_count
                model(batch(device, i, rows=256, width=WIDTH)).square().mean().backward()
                repeated.append(
                    bool(recomputed(session)) and checkpoint.call_count - before == len(recomputed(session))
                )
        print("  " + "".join("+" if each else "." for each in repeated))
        assert all(repeated[20:])


def what_cannot_be_looked_at_is_left_alone(device: torch.device) -> None:
    class Odd(Part):
        def __init__(self) -> None:
            super().__init__()
            self.functions = np.array([lambda x: x], dtype=object)  # which nobody can pickle

    _assert_same_later(Odd, device, **WHOLE)


def a_forward_in_something_else_can_be_copied(device: torch.device) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Part() for _ in range(3))).to(device)
    with moving(**WHOLE) as session:
        for i in range(4):
            model(batch(device, i, rows=256, width=WIDTH)).square().mean().backward()
        assert recomputed(session)
        held = copy.deepcopy({"forward": model[1].forward})
        x = batch(device, 9, rows=256, width=WIDTH)
        assert torch.equal(held["forward"](x), model[1](x))
        assert held["forward"].__self__ is not model[1]


if __name__ == "__main__":
    main("unlike")
