"""Graphs that are not simply walked once: kept, dropped, shared, looked into, differentiated again."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

from tests.scenarios import assert_same, batch, gradients, main, moving, perceptron, train


def branches_that_backward_never_visits(device: torch.device) -> None:
    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        first, second, third = model(x), model(x * 2), model(x * 3)
        del second  # its graph dies at once
        kept.append(third)  # this one outlives the step
        return first.square().mean()

    kept: list[Tensor] = []
    assert_same(lambda device: train(perceptron(device), device, loss_of=loss_of), device)


def a_graph_walked_twice(device: torch.device) -> None:
    def program(device: torch.device) -> list[Tensor]:
        model = perceptron(device)
        results = []
        for i in range(4):
            loss = model(batch(device, i)).square().mean()
            loss.backward(retain_graph=True)
            loss.backward()
            results += gradients(model)
        return results

    for room in (0, 1 << 20, 1 << 30):
        assert_same(program, device, room=room, moves=room < 1 << 30)


def a_graph_walked_again_in_a_later_step(device: torch.device) -> None:
    def program(device: torch.device) -> list[Tensor]:
        model = perceptron(device)
        first = model(batch(device, 0)).square().mean()
        first.backward(retain_graph=True)
        for i in range(3):
            model(batch(device, i)).square().mean().backward()
        first.backward()
        return gradients(model)

    assert_same(program, device)


def two_losses_on_one_graph(device: torch.device) -> None:
    def program(device: torch.device) -> list[Tensor]:
        model = perceptron(device)
        results = []
        for i in range(4):
            h = model(batch(device, i))
            one, other = h.square().mean(), h.tanh().mean()
            one.backward(retain_graph=True)
            other.backward()
            results += [one.detach(), other.detach(), *gradients(model)]
        return results

    assert_same(program, device)


def gradients_of_gradients(device: torch.device) -> None:
    def program(device: torch.device) -> list[Tensor]:
        model = perceptron(device)
        results = []
        for i in range(4):
            x = batch(device, i).requires_grad_()
            (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            (curvature,) = torch.autograd.grad(slope.square().sum(), x, create_graph=True)
            (slope.square().mean() + curvature.square().mean()).backward()
            results += [slope.detach(), curvature.detach(), *gradients(model)]
            model.zero_grad()
        return results

    assert_same(program, device)


class _Force(nn.Module):
    """Returns the slope of its energy: an outermost backward within a forward."""

    def __init__(self, energy: nn.Module) -> None:
        super().__init__()
        self.energy = energy

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        (slope,) = torch.autograd.grad(self.energy(x).sum(), x, create_graph=self.training)
        return slope.tanh() if self.training else slope


def gradients_taken_within_a_forward(device: torch.device) -> None:
    def program(device: torch.device) -> list[Tensor]:
        model = _Force(perceptron(device))
        results = []
        for i in range(3):
            results += train(model.train(), device, steps=2)
            results.append(model.eval()(batch(device, i)))
        return results

    assert_same(program, device)


def a_hessian_vector_product_in_training(device: torch.device) -> None:
    def program(device: torch.device) -> list[Tensor]:
        model = perceptron(device)
        results = []
        for i in range(4):
            loss = model(batch(device, i)).square().mean()
            weights = list(model.parameters())
            slopes = torch.autograd.grad(loss, weights, create_graph=True)
            products = torch.autograd.grad(slopes, weights, grad_outputs=[w.detach() for w in weights])
            with torch.no_grad():
                for weight, slope, product in zip(weights, slopes, products, strict=True):
                    weight -= 0.1 * slope + 0.01 * product
            results += [loss.detach(), *products]
        return results

    assert_same(program, device)


def backward_outside_of_where_forward_was(device: torch.device) -> None:
    """In another function, under no_grad, under autocast, with hooks on tensors."""

    def program(device: torch.device) -> list[Tensor]:
        model = perceptron(device)
        results: list[Tensor] = []
        for i in range(3):
            h = model(batch(device, i))
            h.register_hook(results.append)
            h.retain_grad()
            loss = h.square().mean()
            with torch.no_grad(), torch.autocast(device.type, torch.bfloat16):
                loss.backward()
            results += [h.grad, *gradients(model)]
        return results

    assert_same(program, device)


def a_look_at_what_was_saved(device: torch.device) -> None:
    """`grad_fn._saved_*` asks for the tensor outside of any backward; it counts as no use of it."""

    def program(device: torch.device) -> list[Tensor]:
        model = perceptron(device)
        results = []
        for i in range(4):
            h = model(batch(device, i)).repeat(4, 1)
            square = h * h
            loss = square.mean()
            seen = square.grad_fn._saved_self
            results += [seen.detach().clone(), square.grad_fn._saved_other.detach().clone()]
            del seen
            loss.backward()
            results += gradients(model)
        return results

    assert_same(program, device)


def a_look_while_an_iteration_is_recorded_is_no_use(device: torch.device) -> None:
    """It was taken for the begin of backward, and hardly anything was planned to move."""

    def turn(look: bool) -> int:
        def loss(model: nn.Module, x: Tensor) -> Tensor:
            for k, layer in enumerate(model.children()):
                x = layer(x)
                if look and k == 1:
                    assert x.grad_fn is not None
                    x.grad_fn._saved_result.sum().item()
            return x.square().mean()

        with moving() as session:
            train(perceptron(device), device, steps=6, loss_of=loss)
            saver = session.runtime.saver()
            assert saver is not None
            ((trace,),) = (mover.learner.traces for mover in saver.movers.armed)
        return trace.turn

    with_look, without = turn(look=True), turn(look=False)
    print(f"  backward begins after position {with_look}, without the look {without}")
    assert with_look == without


def anomaly_detection(device: torch.device) -> None:
    def program(device: torch.device) -> list[Tensor]:
        with torch.autograd.set_detect_anomaly(True):
            return train(perceptron(device), device)

    with warnings.catch_warnings(action="ignore"):  # that it slows things down
        assert_same(program, device)


if __name__ == "__main__":
    main("graphs")
