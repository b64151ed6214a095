"""Programs with ways of their own: names that PyTorch uses, comparisons, optimizer state, deep models, timeouts."""

from __future__ import annotations

import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.scenarios import Block, assert_same, batch, main, perceptron
from tests.scenarios.parts import STEPS
from torch_tiers.migrator.model.links import Links
from torch_tiers.migrator.model.plan import Plan
from torch_tiers.migrator.model.trace import Trace
from torch_tiers.migrator.policies import POLICIES

Step = Callable[[int], Tensor]


def _train(optimizers: list[torch.optim.Optimizer], step: Step) -> list[Tensor]:
    """Losses and gradients of some steps, of a model whose `parameters` may be anything."""
    results, parameters = [], [p for o in optimizers for group in o.param_groups for p in group["params"]]
    for i in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = step(i)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        results += [loss.detach(), *(p.grad.clone() for p in parameters)]
    return results


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class HasModules(Pair):
    def __init__(self) -> None:
        super().__init__()
        self.modules = [self.first, self.second]

    def forward(self, x: Tensor) -> Tensor:
        for module in self.modules:
            x = module(x)
        return x


class HasBuffers(Pair):
    def __init__(self) -> None:
        super().__init__()
        self.buffers = deque[float](maxlen=3)

    def forward(self, x: Tensor) -> Tensor:
        self.buffers.append(float(x.detach().mean()))
        return super().forward(x)


class HasParametersOfParts(Pair):
    def parameters(self, part: str) -> Iterator[nn.Parameter]:  # type: ignore[override]
        return getattr(self, part).parameters()


class NamesModulesAsInOldReleases(Pair):
    def named_modules(self) -> Any:  # type: ignore[override]
        return super().named_modules()


class ComparesItsWeight(Pair):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(128))

    def __eq__(self, other: object) -> Any:  # and so it has no hash
        return self.weight == other

    __hash__ = nn.Module.__hash__

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.weight)


def names_and_comparisons_of_a_module_may_be_its_own(device: torch.device) -> None:
    def program(kind: type[Pair], device: torch.device) -> list[Tensor]:
        torch.manual_seed(0)
        model = kind().to(device)
        own = [model.weight] if isinstance(model, ComparesItsWeight) else []
        parameters = [*model.first.parameters(), *model.second.parameters(), *own]
        return _train([torch.optim.SGD(parameters, 0.1)], lambda i: model(batch(device, i)).square().mean())

    for kind in (HasModules, HasBuffers, HasParametersOfParts, NamesModulesAsInOldReleases, ComparesItsWeight):
        assert_same(partial(program, kind), device)


class Momentum(torch.optim.Optimizer):
    """Its state is a tensor for each parameter, and one number for all."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__(parameters, {})
        self.state["steps"] = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.state["steps"] += 1
        for p in self.param_groups[0]["params"]:
            self.state[p] = 0.9 * self.state.get(p, torch.zeros_like(p)) + p.grad
            p -= 0.1 * self.state[p] / self.state["steps"]

    def __eq__(self, other: object) -> Any:
        return isinstance(other, Momentum) and self.param_groups == other.param_groups

    __hash__ = None  # type: ignore[assignment]


def state_and_comparisons_of_an_optimizer_may_be_its_own(device: torch.device) -> None:
    def program(device: torch.device) -> list[Tensor]:
        torch.manual_seed(0)
        model = Pair().to(device)
        optimizers = [Momentum(part.parameters()) for part in (model.first, model.second)]
        return _train(list(optimizers), lambda i: model(batch(device, i)).square().mean())

    assert_same(program, device)


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def a_model_may_be_as_deep_as_python_lets_it_be(device: torch.device) -> None:
    def deep() -> nn.Module:
        model: nn.Module = perceptron(device)
        for _ in range((sys.getrecursionlimit() - 150) // 4):  # so much a call of a module takes
            model = Wrapper(model)
        return model

    def program(model: nn.Module, device: torch.device) -> list[Tensor]:
        first = next(module for module in model.modules() if isinstance(module, nn.Linear))
        return _train([torch.optim.SGD([first.weight], 0.0)], lambda i: model(batch(device, i)).square().mean())

    limit = sys.getrecursionlimit()
    assert_same(partial(program, deep()), device)
    assert sys.getrecursionlimit() == limit


def what_a_handler_raises_while_a_plan_is_made_reaches_the_program(device: torch.device) -> None:
    class Timeout(Exception):
        pass

    def ring(*_: object) -> None:
        raise Timeout

    def slow(trace: Trace, budget: int, links: Links) -> Plan:
        if not rung:
            rung.append(True)
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            time.sleep(0.5)
        return POLICIES["keep"](trace, budget, links)

    rung = list[bool]()

    def program(device: torch.device) -> list[Tensor]:
        model = perceptron(device)
        optimizer, results, caught = torch.optim.SGD(model.parameters(), 0.1), list[Tensor](), 0
        while len(results) < 8:
            try:
                loss = model(batch(device, len(results))).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                results.append(loss.detach())
            except Timeout:  # as plans are made between two steps, the step before is over
                caught += 1
                results.append(loss.detach())
        print(f"  {caught} caught")
        timeouts.append(caught)
        return results

    timeouts = list[int]()
    before = signal.signal(signal.SIGALRM, ring)
    try:
        assert_same(program, device, moves=False, plan=slow)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert timeouts == [0, 1]


if __name__ == "__main__":
    main("own_ways")
