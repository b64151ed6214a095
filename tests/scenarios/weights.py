"""What lives as long as the program is not moved: parameters, buffers, their views; swapped ones included."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.scenarios import assert_same, batch, main, moved, moving, perceptron

WIDTH = 1024  # 4 MiB of weight, 4 KiB a row of activations: what moves by mistake is seen at once
ROWS = 64
ACTIVATION = ROWS * WIDTH * 4


def _bytes_moved(model: nn.Module, device: torch.device, call: Callable[[Tensor], Tensor]) -> int:
    """Return the most bytes that left in one of four iterations."""
    most = 0
    with moving(room=0) as session:
        for i in range(4):
            before = moved(session)["d2h"]
            call(batch(device, i, rows=ROWS, width=WIDTH)).sum().backward()
            model.zero_grad()
            most = max(most, moved(session)["d2h"] - before)
    print(f"  {most} bytes moved an iteration; one weight has {WIDTH * WIDTH * 4}")
    return most


def leaves_weights_buffers_and_their_views_alone(device: torch.device) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)
            self.register_buffer("table", torch.randn(WIDTH, WIDTH) / WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            x = self.linear(x) @ self.weight.t()
            x = x @ self.table @ self.table.t().contiguous().t()  # the copy is no buffer: 4 MiB that may move
            x = x @ self.weight[: WIDTH // 2].t() @ self.weight[: WIDTH // 2]
            return F.linear(x, self.linear.weight) * self.table[:ROWS]

    model = Model().to(device)
    copy = WIDTH * WIDTH * 4
    assert copy <= _bytes_moved(model, device, model) <= copy + 8 * ACTIVATION


def leaves_tied_weights_alone_also_outside_of_modules(device: torch.device) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()).to(device)

    def call(x: Tensor) -> Tensor:
        return model(x) @ model[0].weight.t() @ model[0].weight.data @ model[0].weight.detach().t()

    assert _bytes_moved(model, device, call) <= 6 * ACTIVATION


def leaves_weights_alone_that_functional_call_puts_in(device: torch.device) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).to(device)
    other = {name: value.detach().clone().requires_grad_() for name, value in model.named_parameters()}
    _bytes = _bytes_moved(model, device, lambda x: torch.func.functional_call(model, other, x))
    assert _bytes <= 4 * ACTIVATION


def _shard(model: nn.Module) -> None:
    """Keep every weight in two halves, and put it together around forward and backward, as FSDP does."""
    for layer in model:
        if isinstance(layer, nn.Linear):
            full = layer.weight.data.clone()
            shard = full[: len(full) // 2].clone()
            rest = full[len(full) // 2 :].clone()
            layer.weight.data = shard
            layer.register_forward_pre_hook(partial(_gather, full, shard, rest))
            layer.register_forward_hook(partial(_scatter, full, shard))
            layer.register_full_backward_pre_hook(partial(_gather, full, shard, rest))
            full.untyped_storage().resize_(0)


def _gather(full: Tensor, shard: Tensor, rest: Tensor, layer: nn.Linear, *_: object) -> None:
    full.untyped_storage().resize_(full.numel() * 4)
    # Through `.data`, as FSDP does: the saved weight must not look modified.
    torch.cat([shard, rest], out=full.data)
    layer.weight.data = full


def _scatter(full: Tensor, shard: Tensor, layer: nn.Linear, *_: object) -> None:
    layer.weight.data = shard
    full.untyped_storage().resize_(0)


def leaves_weights_alone_that_are_gathered_and_freed_around_use(device: torch.device) -> None:
    def program(device: torch.device) -> list[Tensor]:
        model = perceptron(device)
        _shard(model)
        results = []
        for i in range(4):
            x = batch(device, i).requires_grad_()
            loss = model(x).square().mean()
            loss.backward()
            results += [loss.detach(), x.grad, *(layer.bias.grad.clone() for layer in model if hasattr(layer, "bias"))]
            for parameter in model.parameters():
                parameter.grad = None
        return results

    assert_same(program, device)


def leaves_a_weight_alone_that_is_set_as_a_plain_view_of_a_flat_parameter(device: torch.device) -> None:
    """FSDP1 without `use_orig_params`: modules see views of one flat parameter."""

    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.flat = nn.Parameter(torch.randn(2 * WIDTH * WIDTH) / WIDTH)
            self.first, self.second = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
            del self.first.weight, self.second.weight

        def forward(self, x: Tensor) -> Tensor:
            views = self.flat.view(2, WIDTH, WIDTH).unbind()
            self.first.weight, self.second.weight = views
            return self.second(self.first(x).tanh())

    model = Flat().to(device)
    assert _bytes_moved(model, device, model) <= 4 * ACTIVATION


if __name__ == "__main__":
    main("weights")
