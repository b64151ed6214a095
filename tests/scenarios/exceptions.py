"""Steps that do not end as they should: training goes on, and nothing of them is left."""

from __future__ import annotations

import gc
import sys
from collections import deque
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.scenarios import assert_same, batch, gradients, main, moved, moving, perceptron, train
from torch_tiers.allocator.sizes import MiB


class _Unlucky(nn.Module):
    """The identity, until `error` is set: then its next forward raises it."""

    def __init__(self) -> None:
        super().__init__()
        self.error: BaseException | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        return x


class _FailingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("no gradient today")


def _interrupted(error: BaseException | None, device: torch.device) -> list[Tensor]:
    """Train with every third forward failing half way; the model is nested, so a stack has to be unwound."""
    unlucky = _Unlucky()
    model = nn.Sequential(perceptron(device), nn.Sequential(unlucky, perceptron(device)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    results = []
    for i in range(9):
        optimizer.zero_grad()
        if i % 3 == 2:
            unlucky.error = error
            with pytest.raises(type(error)):
                model(batch(device, i))
            continue
        loss = model(batch(device, i)).square().mean()
        loss.backward()
        optimizer.step()
        results += [loss.detach(), *gradients(model)]
    return results


def an_exception_in_forward(device: torch.device) -> None:
    assert_same(lambda device: _interrupted(ValueError("bad batch"), device), device)


def control_c_in_forward(device: torch.device) -> None:
    """It is no Exception, and may come anywhere: between two of our own lines, too."""
    assert_same(lambda device: _interrupted(KeyboardInterrupt(), device), device)


class _Table(nn.Module):
    """Multiplies by a buffer, which backward then needs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(128, 1024)
        self.register_buffer("table", torch.ones(1024, 1024))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) @ self.table


def control_c_in_forward_does_not_hide_the_next_model(device: torch.device) -> None:
    """A notebook: cell interrupted, then another model is trained; its buffers are known as such."""
    unlucky = _Unlucky()
    with moving(room=0) as session:
        unlucky.error = KeyboardInterrupt()
        with pytest.raises(KeyboardInterrupt):
            nn.Sequential(perceptron(device), unlucky)(batch(device, 0))
        train(perceptron(device), device, steps=1)
        before = moved(session)["d2h"]
        _Table().to(device)(batch(device, 1, rows=64)).sum().backward()
        gone = moved(session)["d2h"] - before
        print(f"  {gone} bytes moved; the buffer has {4 * MiB}")
        assert gone < MiB


def an_exception_in_backward(device: torch.device) -> None:
    def program(device: torch.device) -> list[Tensor]:
        model = perceptron(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        results = []
        for i in range(9):
            optimizer.zero_grad()
            h = model[:4](batch(device, i))
            loss = model[4:](_FailingBackward.apply(h) if i % 3 == 2 else h).square().mean()
            if i % 3 == 2:
                with pytest.raises(ArithmeticError):
                    loss.backward()
                continue
            loss.backward()
            optimizer.step()
            results += [loss.detach(), *gradients(model)]
        return results

    assert_same(program, device)


def a_tensor_asked_for_after_an_exception(device: torch.device) -> None:
    """The graph is kept, its backward fails half way, and is then walked another way."""

    def program(device: torch.device) -> list[Tensor]:
        model = perceptron(device)
        results = []
        for i in range(3):
            h = model(batch(device, i))
            bad, good = _FailingBackward.apply(h).square().mean(), h.square().mean()
            with pytest.raises(ArithmeticError):
                bad.backward(retain_graph=True)
            good.backward()
            results += gradients(model)
        return results

    assert_same(program, device)


def an_exception_in_a_hook_of_the_users(device: torch.device) -> None:
    def program(device: torch.device) -> list[Tensor]:
        model = perceptron(device)

        def fail(module: nn.Module, arguments: tuple[Tensor]) -> None:
            raise LookupError

        results = []
        for i in range(6):
            if i % 2:
                handle = model[3].register_forward_pre_hook(fail)
                with pytest.raises(LookupError):
                    model(batch(device, i))
                handle.remove()
            results += train(model, device, steps=1)
        return results

    assert_same(program, device)


def evaluation_under_no_grad_between_steps(device: torch.device) -> None:
    def program(device: torch.device) -> list[Tensor]:
        model = perceptron(device)
        results = []
        for i in range(5):
            results += train(model, device, steps=1)
            model.eval()
            with torch.no_grad():
                results.append(model(batch(device, 100 + i)).mean())
            with torch.inference_mode():
                results.append(model(batch(device, 200 + i)).mean().clone())
            model.train()
        return [result.clone() for result in results]

    assert_same(program, device)


def evaluation_that_forgot_no_grad(device: torch.device) -> None:
    def program(device: torch.device) -> list[Tensor]:
        model = perceptron(device)
        results = []
        for i in range(5):
            results += train(model, device, steps=1)
            results += [model(batch(device, 100 + k)).mean().detach() for k in range(i + 1)]
        return results

    assert_same(program, device)


def a_long_evaluation_that_forgot_no_grad_fills_no_tier(device: torch.device) -> None:
    with moving(room=0, dram="32MiB") as session:
        model = perceptron(device)
        train(model, device)
        for i in range(100):  # 400 MiB of saved tensors in all
            model(batch(device, i)).mean()
        train(model, device, steps=2)
        print(f"  peak {session.stats()['peak']}")
        assert session.stats()["peak"]["dram"] < 32 * MiB


def what_a_forward_that_raised_had_saved_is_gone_before_a_validation(device: torch.device) -> None:
    """Which saves nothing, and may need the memory."""
    unlucky = _Unlucky()
    model = nn.Sequential(perceptron(device), unlucky).to(device)
    with moving(dram="64MiB") as session:
        train(model, device, steps=3)
        unlucky.error = ValueError("bad batch")
        with pytest.raises(ValueError, match="bad batch"):
            model(batch(device, 7))
        saver = session.runtime.saver()
        assert saver is not None
        (mover,) = saver.movers.armed
        gc.collect()  # the exception is part of a cycle here, and holds what the forward had
        assert mover.engine.alive
        with torch.no_grad():
            model(batch(device, 8))
        assert (mover.engine.alive, mover.engine.dead) == (0, deque())
        train(model, device, steps=1)


def no_function_of_python_s_runs_while_a_graph_is_freed(device: torch.device) -> None:
    """What a signal's handler raises, as Ctrl-C does, comes in the next that is called, and Python drops it there."""
    called: list[str] = []

    def told(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            called.append(frame.f_code.co_qualname)

    kinds: list[dict[str, Any]] = [{}, {"recompute": True}]
    for arguments in kinds:
        with moving(**arguments):
            model = perceptron(device)
            train(model, device)
            loss = model(batch(device, 9)).square().mean()
            sys.setprofile(told)
            try:
                del loss
            finally:
                sys.setprofile(None)
    assert not called, called


if __name__ == "__main__":
    main("exceptions")
