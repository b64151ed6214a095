"""Programs that call no module, or none before their optimizer's first step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from tests.scenarios import REMADE, assert_same, batch, main, moving, perceptron, recomputed, step, train
from torch_tiers.assembly import Session


def _functional(device: torch.device, optimizers: int = 1) -> list[Tensor]:
    """A network of functions on plain tensors, some steps of it, and what it has come to."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(128, 128, generator=generator).to(device).requires_grad_() for _ in range(6)]
    each = [torch.optim.SGD(weights[k::optimizers], lr=0.01) for k in range(optimizers)]
    losses = []
    for i in range(8):
        x = batch(device, i)
        for weight in weights:
            x = F.layer_norm(F.gelu(x @ weight), (128,))
        loss = x.square().mean() + x.abs().mean()
        loss.backward()
        for optimizer in each:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *weights]


def _step_of(network: Callable[[Tensor], Tensor], weights: list[Tensor], x: Tensor) -> list[Tensor]:
    optimizer = torch.optim.SGD(weights, lr=0.01)
    loss = network(x)
    loss.backward()
    gradients = [weight.grad.clone() for weight in weights if weight.grad is not None]
    optimizer.step()
    optimizer.zero_grad()
    return [loss.detach(), *gradients]


def _sites(session: Session) -> set[str]:
    saver = session.runtime.saver()
    assert saver is not None
    return {site.key for mover in saver.movers.armed for trace in mover.learner.traces for site in trace.sites}


def move(device: torch.device) -> None:
    assert_same(_functional, device)


def are_recomputed(device: torch.device) -> None:
    assert_same(_functional, device, moves=False, **REMADE)
    with moving(**REMADE) as session:
        _functional(device)
        assert len(recomputed(session)) > 6


def may_have_several_optimizers(device: torch.device) -> None:
    def program(device: torch.device) -> list[Tensor]:
        return _functional(device, optimizers=2)

    assert_same(program, device)


def may_replace_its_parameters(device: torch.device) -> None:
    """As those that add points where there are too few. The old ones are gone at once."""

    def program(device: torch.device) -> list[Tensor]:
        optimizer = torch.optim.Adam([torch.full((128, 128), 0.01, device=device, requires_grad=True)], lr=1e-3)
        (group,) = optimizer.param_groups
        losses = []
        for i in range(8):
            loss = F.gelu(batch(device, i) @ group["params"][0]).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            del loss
            (old,) = group["params"]
            group["params"] = [old.detach().clone().requires_grad_()]
            optimizer.state[group["params"][0]] = optimizer.state.pop(old)
            memory = StorageWeakRef(old.untyped_storage())
            del old
            assert memory.expired()
        return [*losses, *group["params"]]

    assert_same(program, device)


def may_be_compiled(device: torch.device) -> None:
    """What `torch.compile` makes of a function is a module, and no model."""

    def program(device: torch.device) -> list[Tensor]:
        def network(x: Tensor) -> Tensor:
            for weight in weights:
                x = torch.tanh(x @ weight)
            return x.square().mean()

        weights = [torch.full((128, 128), 0.01 * k, device=device, requires_grad=True) for k in range(1, 5)]
        compiled = torch.compile(network, backend="aot_eager")
        return [result for i in range(6) for result in _step_of(compiled, weights, batch(device, i))]

    assert_same(program, device)


def a_module_that_is_called_later_is_a_model_as_any_other(device: torch.device) -> None:
    """Some make a step before the first forward, to have the optimizer's state; others go on with a model."""

    def first_a_step(device: torch.device) -> list[Tensor]:
        model = perceptron(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        return [result for i in range(8) for result in step(model, device, i, optimizer)]

    def first_functions(device: torch.device) -> list[Tensor]:
        return [*_functional(device), *train(perceptron(device), device, steps=8)]

    programs: tuple[Callable[[torch.device], list[Tensor]], ...] = (first_a_step, first_functions)
    for program in programs:
        assert_same(program, device)
        with moving() as session:
            program(device)
            model = {key for key in _sites(session) if key.startswith(nn.Sequential.__name__)}
            assert len(model) >= 8, _sites(session)


if __name__ == "__main__":
    main("without_modules")
