"""Programs of which what was recomputed was not what forward had made: nobody had seen it while they were recorded."""

from __future__ import annotations

import random
import time
from contextvars import ContextVar
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.scenarios import WHOLE, assert_same, batch, gradients, main, moving, recomputed, train
from tests.scenarios.recompute import LIGHT

WIDTH = 128


def _layers(block: Any, device: torch.device, count: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(block() for _ in range(count))).to(device)


class _TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)


def _as_plain(block: Any, device: torch.device, steps: int, how: dict[str, Any]) -> None:
    """Check that layers of `block` train as they do without tiers."""

    def program(device: torch.device) -> list[Tensor]:
        return train(_layers(block, device), device, steps=steps)

    assert_same(program, device, moves=False, **how)


def attention_takes_the_same_way_again(device: torch.device) -> None:
    """It is given its input three times, and asks whether these are one: a plain encoder ended in an error."""

    def program(device: torch.device) -> list[Tensor]:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).to(device)
        return train(model, device, steps=6, loss_of=lambda model, x: model(x.view(32, 64, WIDTH)).square().mean())

    assert_same(program, device, moves=False, **WHOLE)
    assert_same(program, device, moves=False, regions=True)


def arguments_that_are_one_are_one_again(device: torch.device) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, other: Tensor, named: Tensor | None = None) -> Tensor:
            h = self.layer(torch.tanh(x))
            return x + (h if other is x else 2 * h) + (h.sin() if named is x else h)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = _layers(Block, device)

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x, x, named=x)
            return x

    def program(device: torch.device) -> list[Tensor]:
        return train(Model(), device, steps=6)

    assert_same(program, device, moves=False, **WHOLE)
    assert_same(program, device, moves=False, regions=True)


def numbers_that_are_drawn_later_are_drawn_again(device: torch.device) -> None:
    """A probability that is raised from 0: while it was recorded nothing was drawn."""
    draws = {"python": random.random, "numpy": np.random.rand}

    class Drops(nn.Module):
        def __init__(self, kind: str) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.p, self.kind = 0.0, kind

        def forward(self, x: Tensor) -> Tensor:
            h = F.gelu(self.first(x))
            if self.p > 0 and draws[self.kind]() < self.p:
                h = h * 0
            return x + self.second(h)

    def program(kind: str, device: torch.device) -> list[Tensor]:
        random.seed(0)
        np.random.seed(0)
        model = _layers(partial(Drops, kind), device)
        results = train(model, device, steps=6)
        for block in model:
            block.p = 0.5
        return [*results, *train(model, device, steps=10)]

    for kind in draws:
        assert_same(partial(program, kind), device, moves=False, **WHOLE)


def statistics_that_are_read_are_left_alone(device: torch.device) -> None:
    """A normalisation of the program's own that extends PyTorch's, which alone reads none in training."""

    class Renormalise(nn.BatchNorm1d):
        def forward(self, x: Tensor) -> Tensor:
            y = (x - self.running_mean) / (self.running_var + self.eps).sqrt()
            with torch.no_grad():
                self.running_mean.lerp_(x.mean(0), self.momentum)
                self.running_var.lerp_(x.var(0), self.momentum)
            return y

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm = nn.Linear(WIDTH, WIDTH), Renormalise(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return x + F.gelu(self.norm(self.layer(x)))

    _as_plain(Block, device, 8, WHOLE)


SCALE: ContextVar[float] = ContextVar("scale", default=1.0)


def what_is_set_around_a_forward_alone_is_so_again(device: torch.device) -> None:
    class Block(_TwoLayers):
        def forward(self, x: Tensor) -> Tensor:
            return x + self.second(F.gelu(self.first(x) * SCALE.get()))

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        token = SCALE.set(2.0)
        try:
            return model(x).square().mean()
        finally:
            SCALE.reset(token)

    def program(device: torch.device) -> list[Tensor]:
        return train(_layers(Block, device), device, steps=6, loss_of=loss)

    assert_same(program, device, moves=False, **WHOLE)


def parameters_that_a_forward_changes_are_changed_once(device: torch.device) -> None:
    """As layers that keep their weights within a norm do: each step ended in an error."""

    class Bounded(_TwoLayers):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.first.weight.clamp_(-0.05, 0.05)
            return x + self.second(F.gelu(self.first(x)))

    _as_plain(Bounded, device, 6, WHOLE)


def a_codebook_that_moves_by_its_data_moves_once(device: torch.device) -> None:
    """An exponential moving average of the program's own, past autograd's counter of versions."""

    class Codebook(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)
            self.register_buffer("mean", torch.zeros(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            h = self.layer(x) - self.mean
            self.mean.data.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
            return x + torch.tanh(h)

    def program(device: torch.device) -> list[Tensor]:
        model = _layers(Codebook, device)
        return [*train(model, device, steps=8), *(buffer.clone() for buffer in model.buffers())]

    assert_same(program, device, moves=False, **WHOLE)
    with moving(**WHOLE) as session:
        train(_layers(Codebook, device), device, steps=8)
        assert not recomputed(session)


def what_is_masked_now_and_then_is_not_made_without_the_mask(device: torch.device) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.second = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            h = self.norm(self.first(x))
            self.calls += 1
            if self.calls % 5 == 0:
                with torch.no_grad():
                    h[:, ::4] = 0
            return x + self.second(h)

    _as_plain(Masked, device, 12, LIGHT)


def an_epsilon_is_no_guess_that_nothing_tested(device: torch.device) -> None:
    """On a branch that begins at zero every epsilon gives the same bits."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.gain = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), 0.0

        def forward(self, x: Tensor) -> Tensor:
            h = F.layer_norm(self.first(x) * self.gain, (WIDTH,), eps=1e-3)
            return x + self.second(torch.tanh(h) * h)

    def program(device: torch.device) -> list[Tensor]:
        model = _layers(Block, device)
        results = train(model, device, steps=5)
        for block in model:
            block.gain = 0.1
        return [*results, *train(model, device, steps=5)]

    assert_same(program, device, moves=False, **LIGHT)


def two_normalisations_have_an_epsilon_each(device: torch.device) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)
            self.one, self.other = nn.LayerNorm(WIDTH, eps=1e-5), nn.LayerNorm(WIDTH, eps=1e-1)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.layer(torch.relu(self.one(x) + self.other(x.sin())))

    _as_plain(Block, device, 8, LIGHT)


def what_is_frozen_between_forward_and_backward_is_recomputed_as_it_was(device: torch.device) -> None:
    class Block(_TwoLayers):
        def forward(self, x: Tensor) -> Tensor:
            return x + self.second(F.gelu(self.first(x)))

    def program(device: torch.device) -> list[Tensor]:
        model, results = _layers(Block, device), []
        for i in range(8):
            loss = model(batch(device, i)).square().mean()
            model[1].first.weight.requires_grad_(False)
            loss.backward()
            model[1].first.weight.requires_grad_(True)
            results += gradients(model)
            model.zero_grad()
        return results

    assert_same(program, device, moves=False, **WHOLE)


def data_that_is_set_until_backward_is_what_backward_uses(device: torch.device) -> None:
    """As in plain PyTorch, which saves a leaf itself; and what it had before is not held."""

    def program(device: torch.device) -> list[Tensor]:
        class Scaled(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(WIDTH))

            def forward(self, x: Tensor) -> Tensor:
                return torch.tanh(self.layer(x)) * self.scale

        model, results = _layers(Scaled, device), []
        for i in range(8):
            loss = model(batch(device, i)).square().mean()
            for parameter in model.parameters():
                parameter.data = parameter.data * 0.5
            loss.backward()
            results += gradients(model)
            model.zero_grad()
        return results

    assert_same(program, device)


class _Dot(torch.autograd.Function):
    """Returns what it has saved as its gradient, where nothing is to be multiplied with."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (weight * x).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return (x if gradient.item() == 1 else x * gradient), None


def a_saved_input_that_is_returned_as_a_gradient_is_not_the_gradient_s_memory(device: torch.device) -> None:
    """To clip the gradient scaled the program's own data."""

    def program(device: torch.device) -> list[Tensor]:
        weight, x = nn.Parameter(torch.ones(2048, WIDTH, device=device)), batch(device, 0)
        other, results = nn.Linear(WIDTH, WIDTH).to(device), []
        for i in range(8):
            (_Dot.apply(weight, x) + 0 * other(batch(device, i)).square().sum()).backward()
            nn.utils.clip_grad_norm_([weight], 1.0)
            results += [weight.grad.clone(), x.clone()]
            weight.grad = None
        return results

    assert_same(program, device, moves=False, share=0)
    assert_same(program, device)


def a_second_backward_takes_as_long_as_the_first(device: torch.device) -> None:
    """Each of n blocks has two ways to the one before it: 2 ** n, when nobody keeps what was made."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(x + self.layer(x))

    with moving(**LIGHT):
        model = _layers(Block, device, 24)
        train(model, device, steps=4)
        loss = model(batch(device, 9)).square().mean()
        begin = time.perf_counter()
        loss.backward(retain_graph=True)
        between = time.perf_counter()
        loss.backward()
        took = between - begin, time.perf_counter() - between
        print(f"  first and second backward: {took[0]:.2f} and {took[1]:.2f} s")
        assert took[1] < 100 * took[0] + 5


def a_long_chain_of_what_is_dropped_is_made_again(device: torch.device) -> None:
    """Of five calls a link, hundreds exceeded how deep Python's may go."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(x + self.layer(x))

    def program(device: torch.device) -> list[Tensor]:
        model = _layers(Block, device, 250)
        return train(model, device, steps=4, loss_of=lambda model, x: model(x[:128]).square().mean())

    assert_same(program, device, moves=False, **LIGHT)


if __name__ == "__main__":
    main("surprises")
