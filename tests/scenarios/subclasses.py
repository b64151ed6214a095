"""Tensors that are no plain tensors: they stay where they are, and work."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from tests.scenarios import assert_same, main, perceptron, train


class _Marked(Tensor):
    """Carries its class through every operation by `__torch_function__`."""


class _Wrapper(Tensor):
    """Has no memory of its own: wraps a tensor and passes every operation on to it."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> _Wrapper:
        return Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        args, kwargs = tree_map(lambda x: x.inner if isinstance(x, cls) else x, (args, kwargs or {}))
        return tree_map(lambda x: cls(x) if isinstance(x, Tensor) else x, function(*args, **kwargs))


class _Unwrap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.inner

    @staticmethod
    def backward(ctx, grad):
        return _Wrapper(grad)


class _Wrap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return _Wrapper(x)

    @staticmethod
    def backward(ctx, grad):
        return grad.inner if isinstance(grad, _Wrapper) else grad


def work_with_a_torch_function_subclass(device: torch.device) -> None:
    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        h = model(x.as_subclass(_Marked))
        assert type(h) is _Marked
        return (h * h).tanh().mean().as_subclass(Tensor) + model(x).mean()

    assert_same(lambda device: train(perceptron(device), device, loss_of=loss_of), device)


def work_with_a_wrapper_subclass(device: torch.device) -> None:
    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        h = model(x)
        wrapped = _Wrap.apply(h)
        assert type(wrapped) is _Wrapper
        return _Unwrap.apply((wrapped * wrapped).tanh()).mean() + h.mean()

    assert_same(lambda device: train(perceptron(device), device, loss_of=loss_of), device)


def work_with_nested_tensors(device: torch.device) -> None:
    """The strided layout is of type `Tensor`, yet has neither size nor stride."""
    for layout in (torch.strided, torch.jagged):

        def loss_of(model: nn.Module, x: Tensor, layout: torch.layout = layout) -> Tensor:
            h = model(x)
            with warnings.catch_warnings(action="ignore"):  # that they are a prototype
                nested = torch.nested.as_nested_tensor([h[:500], h[500:]], layout=layout)
            nested = F.gelu(nested * nested)
            return sum(part.square().mean() for part in nested.unbind())

        print(f"  {layout}")
        assert_same(lambda device, f=loss_of: train(perceptron(device), device, loss_of=f), device)


def work_with_sparse_tensors(device: torch.device) -> None:
    def program(device: torch.device) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        # One entry in each row and column: the order of sums is nobody's business, which CUDA leaves open.
        edges = torch.stack([torch.arange(2048), torch.randperm(2048, generator=generator)])
        graph = torch.sparse_coo_tensor(edges, torch.rand(2048, generator=generator), check_invariants=True)
        graph = graph.coalesce().to(device)

        def loss_of(model: nn.Module, x: Tensor) -> Tensor:
            return torch.sparse.mm(graph, model(x)).square().mean()

        return train(perceptron(device), device, loss_of=loss_of)

    assert_same(program, device)


def work_with_sparse_gradients(device: torch.device) -> None:
    def program(device: torch.device) -> list[Tensor]:
        torch.manual_seed(0)
        table = nn.Embedding(3000, 128, sparse=True).to(device)
        model = nn.Sequential(table, *perceptron(device))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for i in range(4):
            words = torch.randperm(3000, generator=torch.Generator().manual_seed(i))[:2048].to(device)
            optimizer.zero_grad()
            loss = model(words).square().mean()
            loss.backward()
            optimizer.step()
            losses += [loss.detach(), table.weight.grad.coalesce().values()]
        return losses

    assert_same(program, device)


if __name__ == "__main__":
    main("subclasses")
