"""Programs that write weights or buffers in forward, or between forward, backward and the optimizer's step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.scenarios import REMADE, assert_same, batch, main

STEPS = 8


def _model(device: torch.device, layer: Callable[[nn.Linear], nn.Module] = lambda linear: linear) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.LayerNorm(128), layer(nn.Linear(128, 128)), nn.GELU()) for _ in range(4)]
    return nn.Sequential(*blocks).to(device)


def _came_to(model: nn.Module, losses: list[Tensor]) -> list[Tensor]:
    return [*losses, *(tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers()))]


def _is_as_plainly(program: Callable[[torch.device], list[Tensor]], device: torch.device) -> None:
    assert_same(program, device)
    assert_same(program, device, moves=False, **REMADE)


def spectral_norms_iterate_in_forward(device: torch.device) -> None:
    """Two forwards before one backward: the second writes the vectors that the first has computed with."""

    def program(device: torch.device) -> list[Tensor]:
        model, losses = _model(device, spectral_norm), []
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        for i in range(STEPS):
            loss = model(batch(device, i)).square().mean() - model(batch(device, i + 100)).abs().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return _came_to(model, losses)

    _is_as_plainly(program, device)


def sharpness_aware_steps_climb_and_come_back(device: torch.device) -> None:
    """Weights are moved along the gradient, a second forward and backward follow, and they are put back."""

    @contextmanager
    def climbed(model: nn.Module) -> Iterator[None]:
        with torch.no_grad():
            before = [parameter.clone() for parameter in model.parameters()]
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.add_(parameter.grad, alpha=0.05)
        model.zero_grad()
        yield
        with torch.no_grad():
            for parameter, was in zip(model.parameters(), before, strict=True):
                parameter.copy_(was)

    def program(device: torch.device) -> list[Tensor]:
        model, losses = _model(device), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for i in range(STEPS):
            model(batch(device, i)).square().mean().backward()
            with climbed(model):
                loss = model(batch(device, i)).square().mean()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return _came_to(model, losses)

    _is_as_plainly(program, device)


def averages_follow_the_weights(device: torch.device) -> None:
    """A teacher's forward goes before the student's backward, and its weights are an average that each step moves."""

    def program(device: torch.device) -> list[Tensor]:
        model, losses = _model(device), []
        teacher = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for i in range(STEPS):
            out = model(batch(device, i))
            with torch.no_grad():
                wanted = teacher(batch(device, i))
            loss = (out - wanted).square().mean() + out.abs().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            teacher.update_parameters(model)
            losses.append(loss.detach())
        return [*_came_to(model, losses), *_came_to(teacher, [])]

    _is_as_plainly(program, device)


def gradients_are_penalized(device: torch.device) -> None:
    def program(device: torch.device) -> list[Tensor]:
        model, losses = _model(device), []
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        for i in range(STEPS):
            x = batch(device, i).requires_grad_()
            out = model(x).mean()
            (slope,) = torch.autograd.grad(out, x, create_graph=True)
            loss = out + (slope.norm(dim=-1) - 1).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return _came_to(model, losses)

    _is_as_plainly(program, device)


if __name__ == "__main__":
    main("between_passes")
