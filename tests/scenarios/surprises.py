"""Programs of which what was recomputed was not what forward had made: nobody had seen it while they were recorded."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.scenarios import REMADE, assert_same, batch, gradients, main, moving, train

WIDTH = 128


def _layers(block: Any, device: torch.device, count: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(block() for _ in range(count))).to(device)


class _Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.layer(x))


def attention_takes_the_same_way_again(device: torch.device) -> None:
    """It is given its input three times, and asks whether these are one."""

    def program(device: torch.device) -> list[Tensor]:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).to(device)
        return train(model, device, steps=6, loss_of=lambda model, x: model(x.view(32, 64, WIDTH)).square().mean())

    assert_same(program, device, moves=False, **REMADE)
    assert_same(program, device, moves=False, recompute=True)


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

    assert_same(lambda device: train(_layers(Masked, device), device, steps=12), device, moves=False, **REMADE)


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

    assert_same(program, device, moves=False, **REMADE)


def two_normalisations_have_an_epsilon_each(device: torch.device) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)
            self.one, self.other = nn.LayerNorm(WIDTH, eps=1e-5), nn.LayerNorm(WIDTH, eps=1e-1)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.layer(torch.relu(self.one(x) + self.other(x.sin())))

    assert_same(lambda device: train(_layers(Block, device), device, steps=8), device, moves=False, **REMADE)


def what_is_frozen_between_forward_and_backward_is_recomputed_as_it_was(device: torch.device) -> None:
    def program(device: torch.device) -> list[Tensor]:
        model, results = _layers(_Residual, device), []
        for i in range(8):
            loss = model(batch(device, i)).square().mean()
            model[1].layer.weight.requires_grad_(False)
            loss.backward()
            model[1].layer.weight.requires_grad_(True)
            results += gradients(model)
            model.zero_grad()
        return results

    assert_same(program, device, moves=False, **REMADE)


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
    assert_same(program, device, moves=False, **REMADE)


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

    with moving(**REMADE):
        model = _layers(_Residual, device, 24)
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

    def program(device: torch.device) -> list[Tensor]:
        model = _layers(_Residual, device, 250)
        return train(model, device, steps=4, loss_of=lambda model, x: model(x[:128]).square().mean())

    assert_same(program, device, moves=False, **REMADE)


if __name__ == "__main__":
    main("surprises")
