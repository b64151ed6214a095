"""Saved tensors that are dropped and recomputed: bit for bit, once, and refused where plain PyTorch refuses."""

from __future__ import annotations

import gc
from collections.abc import Callable

import psutil
import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from tests.scenarios import (
    REMADE,
    assert_same,
    batch,
    bits,
    deterministic_kernels,
    gradients,
    main,
    moving,
    new_objects,
    train,
)
from torch_tiers.allocator.sizes import MiB
from torch_tiers.assembly import Session
from torch_tiers.migrator.recompute.replays import operators_of
from torch_tiers.migrator.saved.dropped import Dropped


class _Block(nn.Module):
    """Saves the outputs of a normalisation and of an activation function."""

    def __init__(self, change: Callable[[Tensor, Tensor], object] = lambda x, y: None) -> None:
        super().__init__()
        self.norm, self.expand, self.contract = nn.LayerNorm(128), nn.Linear(128, 256), nn.Linear(256, 128)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        h = self.expand(self.norm(x))
        y = F.gelu(h)
        out = self.contract(y)
        self.change(h, y)
        return x + out


def _blocks(device: torch.device, count: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(_Block() for _ in range(count))).to(device)


def _dropped(session: Session) -> int:
    """How many sites the plan has recomputed."""
    saver = session.runtime.saver()
    assert saver is not None
    return sum(len(plan.recompute) for mover in saver.movers.armed for plan in mover.learner.plans)


def gives_the_same_gradients(device: torch.device) -> None:
    for arguments in (REMADE, {"recompute": True}):
        assert_same(lambda device: train(_blocks(device), device), device, moves=False, **arguments)


def finds_what_modules_and_functions_make(device: torch.device) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.bn, self.next = nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3)
            self.group, self.last = nn.GroupNorm(2, 8), nn.Conv2d(8, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            h = F.relu(self.bn(self.conv(x.view(-1, 4, 16, 16))), inplace=True)
            h = self.last(F.silu(self.group(self.next(h)) * 2 + 1))
            return F.layer_norm(F.dropout(torch.tanh(h) / 3, 0.1), h.shape[-1:]).square()

    torch.manual_seed(0)
    model = Model().to(device)
    with moving(**REMADE) as session:
        train(model, device, steps=4, loss_of=lambda model, x: model(x[:64, :].reshape(-1)[: 4 * 256 * 8]).mean())
        saver = session.runtime.saver()
        assert saver is not None
        names = {
            operators_of(name).partition("(")[0]
            for mover in saver.movers.armed
            for one in mover.verified.values()
            for name in one.held
        }
    print(f"  {sorted(names)}")
    assert {"relu_", "silu"} <= names


def what_was_changed_before_backward_is_as_it_was(device: torch.device) -> None:
    """A bias that plain PyTorch does not look at in backward, and an input that the next batch is copied into."""

    def program(device: torch.device) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 8)).to(device)
        results, x = train(model, device), batch(device, 8)
        for i in range(4):
            model.zero_grad()
            loss = (x.add(1).tanh().detach() * model(x.mul(2).sigmoid())[:, :1]).sum()
            with torch.no_grad():
                model[1].bias.add_(1)
                x.copy_(batch(device, i))
            loss.backward()
            results += gradients(model)
        return results

    assert_same(program, device, moves=False, **REMADE)


def a_batch_that_lies_in_an_array_of_numpy_s_may_be_overwritten(device: torch.device) -> None:
    """By the next one, before backward: nothing tells of that, and plain PyTorch needs it no more."""

    def program(device: torch.device) -> list[Tensor]:
        torch.manual_seed(0)
        array = batch(torch.device("cpu"), 0).numpy()
        model, results = _blocks(device, 1), []
        for i in range(8):
            array[...] = batch(torch.device("cpu"), i).numpy()
            model.zero_grad()
            loss = model((torch.from_numpy(array).to(device) * 2).sin().tanh()).square().mean()
            if i > 4:
                array[...] = 0
            loss.backward()
            results += gradients(model)
        return results

    assert_same(program, device, moves=False, **REMADE)


def backward_may_have_other_threads_than_forward(device: torch.device) -> None:
    def program(device: torch.device) -> list[Tensor]:
        model, results = _blocks(device, 1), []
        threads = torch.get_num_threads()
        for i in range(6):
            model.zero_grad()
            loss = model(batch(device, i).sin()).square().mean()
            torch.set_num_threads(threads + (i > 3))
            loss.backward()
            torch.set_num_threads(threads)
            results += gradients(model)
        return results

    assert_same(program, device, moves=False, **REMADE)


def a_long_validation_after_a_forward_without_backward_fills_no_memory(device: torch.device) -> None:
    model = _blocks(device, 1)
    with moving(**REMADE):
        train(model, device)
        x = batch(device, 0, rows=64)
        for _ in range(2):
            model(x)
            with torch.no_grad():
                for _ in range(200):
                    model(x)
            gc.collect()
            before = psutil.Process().memory_info().rss
        with torch.no_grad():
            for _ in range(400):
                model(x)
        assert psutil.Process().memory_info().rss - before < 16 * MiB


def holds_no_memory(device: torch.device) -> None:
    model, seen = _blocks(device, 1), []
    model[0].change = lambda h, y: seen.append(StorageWeakRef(y.untyped_storage()))
    with moving(**REMADE) as session:
        train(model, device)
        assert _dropped(session) >= 3  # of normalisation, linear layer and activation function
        loss = model(batch(device, 9)).sum()
        assert seen[-1].expired()
        loss.backward()


def parts_of_a_fused_projection_are_made_at_once(device: torch.device) -> None:
    """Each part was left where it was: what it takes part in was there already, as its neighbour."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(128, 3 * 128), nn.Linear(128, 8)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (part.transpose(1, 2) for part in self.qkv(x).view(3, -1, 64, 4, 32).unbind(0))
            return self.out((torch.softmax(q @ k.mT, -1) @ v).transpose(1, 2).flatten(2))

    def program(device: torch.device) -> list[Tensor]:
        torch.manual_seed(0)
        return train(nn.Sequential(nn.Tanh(), Model()).to(device), device, steps=6)

    assert_same(program, device, moves=False, **REMADE)


def leaves_running_statistics_and_random_numbers_alone(device: torch.device) -> None:
    def program(device: torch.device) -> list[Tensor]:
        torch.manual_seed(0)
        layers = [nn.Linear(128, 128), nn.BatchNorm1d(128), nn.ReLU(inplace=True), nn.Dropout(0.1)]
        model = nn.Sequential(*layers, nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 8)).to(device)
        return [*train(model, device), *model.buffers(), torch.rand(4, device=device)]

    assert_same(program, device, moves=False, **REMADE)


def holds_under_autocast(device: torch.device) -> None:
    def program(device: torch.device) -> list[Tensor]:
        model = _blocks(device)

        def loss_of(model: nn.Module, x: Tensor) -> Tensor:
            with torch.autocast(device.type, dtype=torch.bfloat16):
                return model(x[:512]).float().square().mean()  # few rows: a CPU may have to emulate bfloat16

        results = train(model, device, loss_of=loss_of)
        with torch.autocast(device.type, dtype=torch.bfloat16):  # and its backward inside
            results += train(model, device, loss_of=lambda model, x: model(x[:512]).square().mean())
        return results

    assert_same(program, device, moves=False, **REMADE)


def holds_for_a_second_backward(device: torch.device) -> None:
    def program(device: torch.device) -> list[Tensor]:
        model = _blocks(device)
        results = []
        for i in range(4):
            loss = model(batch(device, i)).square().mean()
            for _ in range(3):
                loss.backward(retain_graph=True)
            results += gradients(model)
            del loss
        return results

    assert_same(program, device, moves=False, **REMADE)


def holds_for_second_derivatives(device: torch.device) -> None:
    def program(device: torch.device) -> list[Tensor]:
        model = _blocks(device)
        results = []
        for i in range(4):
            x = batch(device, i).requires_grad_()
            (grad,) = torch.autograd.grad(model(x).square().mean(), x, create_graph=True)
            grad.square().sum().backward()
            results += gradients(model)
        return results

    assert_same(program, device, moves=False, **REMADE)


def needs_no_node_that_backward_has_released(device: torch.device) -> None:
    """Two losses on one trunk: the first backward releases it, the second asks for its output all the same."""

    def program(device: torch.device) -> list[Tensor]:
        torch.manual_seed(0)
        trunk, head = nn.Linear(128, 128).to(device), nn.Linear(128, 8).to(device)
        optimizer, results = torch.optim.SGD([*trunk.parameters(), *head.parameters()], lr=0.1), []
        for i in range(5):
            h = F.gelu(trunk(batch(device, i)))
            one, other = h.square().mean(), head(h).square().mean()
            one.backward(inputs=list(trunk.parameters()))
            results += [*torch.autograd.grad(other, list(head.parameters())), *gradients(trunk)]
            optimizer.step()
        return results

    assert_same(program, device, moves=False, **REMADE)


def refuses_a_change_of_what_was_dropped_and_of_its_input(device: torch.device) -> None:
    changes: list[Callable[[Tensor, Tensor], object]] = [
        lambda h, y: y.data.add_(0) is y.add_(1),
        lambda h, y: h.add_(1),
    ]
    for change in changes:
        with moving(**REMADE) as session:
            model = _blocks(device)
            train(model, device)
            assert _dropped(session)

            def spoil(h: Tensor, y: Tensor, change: Callable[[Tensor, Tensor], object] = change) -> None:
                with torch.no_grad():
                    change(h, y)

            model[1].change = spoil
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                model(batch(device, 9)).sum().backward()
            model[1].change = lambda h, y: None
            train(model, device)


def leaves_nothing_behind_after_exceptions(device: torch.device) -> None:
    def fail(h: Tensor, y: Tensor) -> None:
        raise ArithmeticError

    gc.collect()
    with moving(**REMADE) as session:
        model = _blocks(device)
        train(model, device)
        assert _dropped(session)
        gc.disable()
        try:
            model[2].change = fail
            for i in range(3):
                with pytest.raises(ArithmeticError):
                    model(batch(device, i))
            model[2].change = lambda h, y: None
            loss = model(batch(device, 0)).sum()
            del loss  # a forward that nobody goes back through
        finally:
            gc.enable()
        assert not [thing for thing in gc.get_objects() if type(thing) is Dropped]
        train(model, device)


def takes_what_has_another_shape_than_the_one_that_was_tried(device: torch.device) -> None:
    def program(device: torch.device) -> list[Tensor]:
        model = _blocks(device)
        results = train(model, device)
        for rows in (96, 2048, 96):
            model(batch(device, 9, rows=rows)).sum().backward()
            results += gradients(model)
        return results

    assert_same(program, device, moves=False, **REMADE)


def recomputes_shapes_that_come_again(device: torch.device) -> None:
    """Of more than are recorded, in a layout of their own. One is tried when it comes for the second time."""
    sizes = [(side, across) for side in (32, 40, 48, 56) for across in (32, 40, 48)]

    def program() -> tuple[list[Tensor], list[int]]:
        torch.manual_seed(0)
        layers = [layer for _ in range(3) for layer in (nn.Conv2d(16, 16, 3, padding=1), nn.GELU())]
        model = nn.Sequential(*layers).to(device, memory_format=torch.channels_last)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        generator, results, dropped = torch.Generator().manual_seed(1), [], []
        for size in 5 * sizes:
            images = torch.randn(4, 16, *size, generator=generator).to(device)
            loss = model(images.contiguous(memory_format=torch.channels_last)).square().mean()
            dropped.append(count(Dropped))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            results.append(loss.detach())
        return [*results, *model.parameters()], dropped

    with deterministic_kernels(), new_objects() as count:
        expected, _ = program()
        with moving(**REMADE):
            results, dropped = program()
    assert bits(results) == bits(expected)
    each = len(sizes)
    assert 0 < min(dropped[each : 2 * each]) < max(dropped), "most were not recorded"
    assert {*dropped[-each:]} == {max(dropped)}


def plans_without_what_has_a_new_shape_in_every_step(device: torch.device) -> None:
    """What experts save of their tokens. A product's result is dropped at shapes that were tried, so it never is."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(128, 128), nn.GELU()))).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    planned = []
    with moving(**REMADE) as session:
        for step in range(80):
            model(batch(device, 0, rows=4096 - 16 * step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            planned.append(_dropped(session))
    assert planned[20] > planned[-1] > 0, "sums and activations are dropped at any shape"


class _Masked(nn.Module):
    """From its tenth forward on it masks what an operation made that might have been in place, and was not."""

    def __init__(self, operation: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(128, 128), nn.LayerNorm(128), nn.Linear(128, 128)
        self.operation, self.calls = operation, 0

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h = self.operation(h, self.norm(h))
        self.calls += 1
        if self.calls > 9:
            with torch.no_grad():
                h[:, ::4] = 0
        return x + self.second(h)


def what_is_masked_later_on_was_not_made_in_place(device: torch.device) -> None:
    """Both have been changed once, an addition in place and one that was masked."""

    def program(operation: Callable[[Tensor, Tensor], Tensor]) -> Callable[[torch.device], list[Tensor]]:
        def run(device: torch.device) -> list[Tensor]:
            torch.manual_seed(0)
            return train(nn.Sequential(*(_Masked(operation) for _ in range(3))).to(device), device, steps=14)

        return run

    for operation in (torch.add, torch.mul, lambda h, norm: F.silu(norm), lambda h, norm: F.leaky_relu(norm)):
        assert_same(program(operation), device, **REMADE)


if __name__ == "__main__":
    main("recompute")
