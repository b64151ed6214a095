"""torch.func inside of programs that train: its transforms refuse to run under saved-tensor hooks."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, stack_module_state, vjp, vmap

from tests.scenarios import REMADE, assert_same, batch, gradients, main, moving, perceptron, recomputed, train

M_PERTURB = -6  # of glibc's mallopt


def grad_vjp_jvp_and_jacobians_between_steps(device: torch.device) -> None:
    def program(device: torch.device) -> list[Tensor]:
        model = perceptron(device)

        def f(x: Tensor) -> Tensor:
            return (x.sin() * x).sum()

        results = []
        for i in range(4):
            x = batch(device, i)
            results += train(model, device, steps=1)
            results += [grad(f)(x), grad(grad(lambda x: x**3))(x[0, 0]), vjp(torch.sin, x)[1](x)[0]]
            results += [jvp(torch.sin, (x,), (x,))[1], jacrev(torch.sin)(x[0]), jacfwd(torch.sin)(x[0])]
            results += [hessian(f)(x[0, :8]), vmap(grad(f))(x)]
        return results

    assert_same(program, device)


def gradients_of_a_model_by_functional_call(device: torch.device) -> None:
    """Inside of `grad` the module's parameters are wrappers that have no storage."""

    def program(device: torch.device) -> list[Tensor]:
        model = perceptron(device)

        def loss_of(weights: dict[str, Tensor], x: Tensor) -> Tensor:
            return functional_call(model, weights, x).square().mean()

        results = []
        for i in range(4):
            results += train(model, device, steps=1)
            weights = {name: value.detach() for name, value in model.named_parameters()}
            results += grad(loss_of)(weights, batch(device, i)).values()
        return results

    assert_same(program, device)


def gradients_of_every_sample(device: torch.device) -> None:
    def program(device: torch.device) -> list[Tensor]:
        model = perceptron(device)

        def loss_of(weights: dict[str, Tensor], row: Tensor) -> Tensor:
            return functional_call(model, weights, row).square().mean()

        results = []
        for i in range(3):
            results += train(model, device, steps=1)
            weights = {name: value.detach() for name, value in model.named_parameters()}
            results += vmap(grad(loss_of), (None, 0))(weights, batch(device, i, rows=64)).values()
        return results

    assert_same(program, device)


def an_ensemble_trained_under_vmap(device: torch.device) -> None:
    """vmap inside of an ordinary graph: what it saves reaches the hooks."""

    def program(device: torch.device) -> list[Tensor]:
        models = [perceptron(device, seed=k) for k in range(3)]
        weights, buffers = stack_module_state(models)

        def call(w: dict[str, Tensor], b: dict[str, Tensor], x: Tensor) -> Tensor:
            return functional_call(models[0], (w, b), x)

        results = []
        for i in range(4):
            loss = vmap(call, (0, 0, None))(weights, buffers, batch(device, i)).square().mean()
            loss.backward()
            results += [loss.detach(), *(w.grad.clone() for w in weights.values())]
            results += train(perceptron(device), device, steps=1)
        return results

    assert_same(program, device)


def a_meta_gradient_through_torch_func(device: torch.device) -> None:
    """MAML: an inner `grad` within the loss that `backward` walks."""

    def program(device: torch.device) -> list[Tensor]:
        model = perceptron(device)

        def inner(weights: dict[str, Tensor], x: Tensor) -> Tensor:
            return functional_call(model, weights, x).square().mean()

        results = []
        for i in range(4):
            weights = dict(model.named_parameters())
            slopes = grad(inner)(weights, batch(device, 2 * i))
            adapted = {name: weights[name] - 0.1 * slopes[name] for name in weights}
            loss = inner(adapted, batch(device, 2 * i + 1))
            model.zero_grad()
            loss.backward()
            results += [loss.detach(), *gradients(model), *train(model, device, steps=1)]
        return results

    assert_same(program, device)


def batched_gradients_of_one_graph(device: torch.device) -> None:
    """`is_grads_batched` walks a graph under vmap: what was saved comes back inside of it."""

    def program(device: torch.device) -> list[Tensor]:
        model = perceptron(device)
        results = []
        for i in range(4):
            x = batch(device, i).requires_grad_()
            y = model(x)
            seeds = torch.stack([torch.ones_like(y), 2 * torch.ones_like(y)])
            results += torch.autograd.grad(y, x, seeds, is_grads_batched=True, retain_graph=True)
            y.square().mean().backward()
            results += gradients(model)
        return results

    assert_same(program, device)


def the_user_s_own_hooks_make_torch_func_refuse_as_ever(device: torch.device) -> None:
    with moving():
        train(perceptron(device), device, steps=1)
        with (
            torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
            pytest.raises(RuntimeError, match="saved tensor"),
        ):
            grad(torch.sin)(torch.zeros((), device=device))


def forward_mode_in_training(device: torch.device) -> None:
    """It saves tensors that stand for zeros and have no memory: storages at address 0."""

    def program(device: torch.device) -> list[Tensor]:
        model = perceptron(device)
        results = []
        for i in range(4):
            x = batch(device, i)
            with forward_ad.dual_level():
                y = model(forward_ad.make_dual(x, torch.ones_like(x)))
                primal, tangent = forward_ad.unpack_dual(y)
                loss = primal.square().mean() + tangent.square().mean()
                loss.backward()
            results += [loss.detach(), *gradients(model)]
        return results

    libc = ctypes.CDLL(None)
    libc.mallopt(M_PERTURB, 0xA5)  # memory that nobody has written to is no zero by chance
    try:
        assert_same(program, device, room=0)
    finally:
        libc.mallopt(M_PERTURB, 0)


def a_transform_may_be_what_calls_a_model_first(device: torch.device) -> None:
    """What a transform has begun is nothing that the recorder's check of itself is part of."""
    for transform in (lambda f, x: jvp(f, (x,), (x,)), lambda f, x: vmap(f)(x), lambda f, x: vmap(jacfwd(f))(x[:8])):
        model = perceptron(device)
        with moving(**REMADE) as session:
            transform(model, batch(device, 0))
            train(model, device)
            assert recomputed(session)


if __name__ == "__main__":
    main("functional")
