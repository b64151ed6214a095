"""What else users do to saved tensors: hooks of their own, offloading, checkpointing, attributes of ctx."""

from __future__ import annotations

from contextlib import ExitStack

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.scenarios import assert_same, batch, bits, gradients, main, moving, perceptron, train
from torch_tiers.allocator.sizes import MiB


def saved_tensors_hooks_around_a_part(device: torch.device) -> None:
    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        h = model[:3](x)
        with saved_tensors_hooks(lambda t: t.detach().half(), lambda t: t.float()):
            h = model[3:6](h)
        return model[6:](h).square().mean()

    assert_same(lambda device: train(perceptron(device, depth=6), device, loss_of=loss_of), device)


def saved_tensors_hooks_around_the_first_forward(device: torch.device) -> None:
    """Ours must not be pushed on top of the program's, whose `with` block would then pop ours."""

    def program(device: torch.device) -> list[Tensor]:
        model = perceptron(device)
        packed: list[int] = []
        with saved_tensors_hooks(lambda t: packed.append(t.numel()) or t.detach(), lambda t: t):
            loss = model(batch(device, 0)).square().mean()
        assert packed
        count = len(packed)
        loss.backward()
        results = [loss.detach(), *train(model, device)]
        assert len(packed) == count
        return results

    assert_same(program, device)


def save_on_cpu_around_a_part(device: torch.device) -> None:
    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        with save_on_cpu(pin_memory=device.type == "cuda"):
            h = model[:4](x)
        return model[4:](h).square().mean()

    assert_same(lambda device: train(perceptron(device, depth=6), device, loss_of=loss_of), device)


def the_users_own_checkpoints(device: torch.device) -> None:
    for reentrant in (True, False):

        def loss_of(model: nn.Module, x: Tensor, reentrant: bool = reentrant) -> Tensor:
            h = model[:3](x)
            h = checkpoint(model[3:7], h, use_reentrant=reentrant)
            h = checkpoint_sequential(model[7:], 2, h, use_reentrant=reentrant)
            return h.square().mean()

        print(f"  reentrant: {reentrant}")
        assert_same(lambda device, f=loss_of: train(perceptron(device, depth=8), device, loss_of=f), device)


def checkpoints_within_checkpoints(device: torch.device) -> None:
    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        def inner(x: Tensor) -> Tensor:
            return checkpoint(model[2:4], model[:2](x), use_reentrant=False).sin()

        return model[4:](checkpoint(inner, x, use_reentrant=False)).square().mean()

    assert_same(lambda device: train(perceptron(device), device, loss_of=loss_of), device)


class _Stash(torch.autograd.Function):
    """x * x, its input kept as an attribute of ctx."""

    @staticmethod
    def forward(ctx, x):
        ctx.x = x
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * ctx.x * grad


def tensors_kept_on_ctx(device: torch.device) -> None:
    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        return _Stash.apply(model(x).repeat(16, 1)).mean()  # 8 MiB that no hook sees

    stats = assert_same(lambda device: train(perceptron(device), device, loss_of=loss_of), device)
    print(f"  unmanaged bytes: {stats['unmanaged_bytes']}")
    if device.type == "cuda":  # nobody counts the memory of a program on the CPU
        assert stats["unmanaged_bytes"] >= 8 * MiB


def hooks_disabled_by_the_program(device: torch.device) -> None:
    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        h = model[:4](x)
        with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
            h = model[4:6](h)
        return model[6:](h).square().mean()

    assert_same(lambda device: train(perceptron(device), device, loss_of=loss_of), device)


def the_program_s_hooks_lie_on_top_at_the_session_s_end(device: torch.device) -> None:
    """Ours cannot be taken from under them; from there on they do nothing."""

    def loss(i: int) -> Tensor:
        return model(batch(device, i)).square().mean()

    model = perceptron(device)
    with ExitStack() as outer:
        with moving():
            loss(0).backward()
            outer.enter_context(saved_tensors_hooks(lambda t: t.detach(), lambda t: t))
        loss(1).backward()
    loss(2).backward()
    ours = gradients(model)
    model = perceptron(device)
    for i in range(3):
        loss(i).backward()
    assert bits(ours) == bits(gradients(model))


if __name__ == "__main__":
    main("hooks")
