"""Autograd's check for in-place modification, which saved-tensor hooks switch off, is put back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.scenarios import assert_same, batch, main, moved, moving, perceptron, train
from torch_tiers.allocator.sizes import MiB

LEAVING = 16 * MiB  # of room: what was offloaded is never released
AWAY = 0


class _Square(nn.Module):
    """Saves its input, which `change` then gets."""

    def __init__(self, change: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.linear = nn.Linear(128, 128)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x).repeat(2, 1)  # 2 MiB: a group by itself, so it leaves at once
        y = h.square()
        self.change(h)
        return y.sum()


def _nothing(h: Tensor) -> None:
    pass


def _add(h: Tensor) -> None:
    h.add_(1)


def _backward(change: Callable[[Tensor], object], device: torch.device) -> None:
    torch.manual_seed(0)
    model = _Square(change).to(device)
    model(batch(device, 0)).backward()


def _refused(change: Callable[[Tensor], object], device: torch.device) -> None:
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
        _backward(change, device)
    print(f"  {caught.value}")
    assert "FloatTensor [4096, 128]]" in str(caught.value)


def refuses_a_tensor_that_stays(device: torch.device) -> None:
    _refused(_add, device)  # as plain PyTorch does
    with moving(policy="keep"):
        model = _Square(_nothing).to(device)
        _train_a_little(model, device)
        model.change = _add
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            model(batch(device, 9)).backward()


def refuses_a_tensor_that_is_still_leaving(device: torch.device) -> None:
    with moving(room=LEAVING) as session:
        _backward(_nothing, device)
        assert moved(session)["d2h"] > 0
        assert moved(session)["h2d"] == 0
        _refused(_add, device)


def refuses_a_tensor_that_is_away(device: torch.device) -> None:
    with moving(room=AWAY) as session:
        _backward(_nothing, device)
        assert moved(session)["h2d"] > 0
        _refused(_add, device)


def refuses_a_planned_tensor_that_is_away(device: torch.device) -> None:
    with moving(room=AWAY) as session:
        model = _Square(_nothing).to(device)
        _train_a_little(model, device)
        assert moved(session)["h2d"] > 0
        model.change = _add
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            model(batch(device, 9)).backward()


def refuses_a_change_through_a_view(device: torch.device) -> None:
    for room in (LEAVING, AWAY):
        with moving(room=room):
            _refused(lambda h: h[3].zero_(), device)


def refuses_a_change_under_no_grad(device: torch.device) -> None:
    def change(h: Tensor) -> None:
        with torch.no_grad():
            h.mul_(2)

    for room in (LEAVING, AWAY):
        with moving(room=room):
            _refused(change, device)


def refuses_a_change_to_an_output_that_was_saved(device: torch.device) -> None:
    def program() -> None:
        y = perceptron(device, depth=1)(batch(device, 0)).exp()
        y.mul_(2)
        y.sum().backward()

    for room in (LEAVING, AWAY):
        with moving(room=room), pytest.raises(RuntimeError, match="modified by an inplace operation"):
            program()
        with moving(policy="keep"), pytest.raises(RuntimeError, match="modified by an inplace operation"):
            program()


def refuses_a_second_backward_after_the_change(device: torch.device) -> None:
    for room in (LEAVING, AWAY):
        with moving(room=room):
            h = perceptron(device, depth=1)(batch(device, 0))
            loss = h.square().sum()
            loss.backward(retain_graph=True)
            with torch.no_grad():
                h.add_(1)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()


class _Spoil(torch.autograd.Function):
    """The identity, whose backward changes the tensor that it saved."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.saved_tensors[0].zero_()
        return grad


def refuses_what_backward_itself_has_changed(device: torch.device) -> None:
    def program() -> None:
        h = perceptron(device, depth=1)(batch(device, 0)).repeat(4, 1)
        square = h.square()
        (square + _Spoil.apply(h)).sum().backward()  # square asks for h after the other has spoiled it

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        program()
    for room in (LEAVING, AWAY):
        print(f"  room {room}")
        with moving(room=room), pytest.raises(RuntimeError, match="modified by an inplace operation"):
            program()


def allows_what_plain_pytorch_allows(device: torch.device) -> None:
    """In-place on what nobody saved, after its last use, and where the branch that saved it is not in the loss."""

    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        h = model(x)
        y = (h + 1).mul_(2)  # saves nothing of h + 1
        unused = h.square()
        del unused
        h = h.add_(1)  # its square is not in the loss; the last tanh's output is, and add_ bumps its version
        return (y * y).mean()

    def program(device: torch.device) -> list[Tensor]:
        model = perceptron(device)
        model.append(nn.Linear(128, 128)).to(device)  # whose output nobody saved
        return train(model, device, loss_of=loss_of)

    assert_same(program, device)


def allows_relu_in_place_on_what_batch_norm_returned(device: torch.device) -> None:
    def program(device: torch.device) -> list[Tensor]:
        torch.manual_seed(0)
        layers = [nn.Linear(128, 128), nn.BatchNorm1d(128), nn.ReLU(inplace=True)]
        return train(nn.Sequential(*layers, *layers[1:], nn.Linear(128, 8)).to(device), device)

    assert_same(program, device)


def allows_a_change_after_backward(device: torch.device) -> None:
    def program(device: torch.device) -> list[Tensor]:
        model, x = perceptron(device), batch(device, 0)
        results = []
        for _ in range(3):
            loss = model(x).square().mean()
            loss.backward()
            results.append(loss.detach())
            x.add_(1)  # the first layer saved it
        return results

    assert_same(program, device)


def _train_a_little(model: nn.Module, device: torch.device) -> None:
    train(model, device, loss_of=lambda model, x: model(x))


if __name__ == "__main__":
    main("version_check")
