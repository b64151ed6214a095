"""Programs whose modules change once they were seen to be repeatable: results stay the same."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.scenarios import WHOLE, batch, main, moving, recomputed
from tests.scenarios.parts import AT, WIDTH, Part, assert_same_later
from torch_tiers.migrator.recompute import regions


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
        assert_same_later(lambda draw=draw: Dropping(draw), device, **WHOLE)  # type: ignore[misc]


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

    assert_same_later(Drawing, device, **WHOLE)


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

    assert_same_later(Logging, device, **WHOLE)


def what_is_put_in_place_of_another_before_backward_is_not_found(device: torch.device) -> None:
    class Scaled(Part):
        by: Callable[[float], float] = staticmethod(lambda a: a)

        def __init__(self) -> None:
            super().__init__()
            self.first_scale, self.scales, self.named = (1.0,), [1.0], {"scale": 1.0}
            self.array, self.thing = np.ones(1), SimpleNamespace(scale=1.0)

        def between(self, x: Tensor) -> Tensor:
            scale = self.first_scale[0] * self.scales[0] * self.named["scale"] * float(self.array[0])
            return F.gelu(x) * self.by(scale * self.thing.scale)

        def replace(self) -> None:
            self.first_scale, self.scales, self.named = (1.1,), [1.2], {"scale": 0.8}
            self.array, self.thing, self.by = np.full(1, 0.9), SimpleNamespace(scale=0.7), lambda a: a * a

    def forward(model: nn.Module, x: Tensor, i: int) -> Tensor:
        made: Tensor = model(x)
        if i >= AT:
            for part in model.children():
                part.replace()  # type: ignore[operator]
        return made

    assert_same_later(Scaled, device, forward=forward, **WHOLE)


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

    assert_same_later(Frozen, device, **WHOLE)


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

    assert_same_later(Hidden, device, **WHOLE)


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

    assert_same_later(Patched, device, **WHOLE)
    assert_same_later(Turning, device, **WHOLE)


def a_forward_that_the_program_has_wrapped_outlives_its_class(device: torch.device) -> None:
    class Wrapped(Part):
        def later(self) -> None:
            plain = self.forward
            self.forward = lambda x: plain(x) / 2  # type: ignore[method-assign]
            self.__class__ = Part  # type: ignore[assignment]

    assert_same_later(Wrapped, device, **WHOLE)


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


if __name__ == "__main__":
    main("changed_modules")
