"""What an optimizer updates, and no forward reads, is found; what a model has never is."""

from __future__ import annotations

import torch
from torch import Tensor, nn, optim

from torch_tiers.migrator.program.master_weights import MasterWeights


class Program:
    """A layer in bf16, of which an optimizer updates a copy; and an optimizer of another parameter."""

    def __init__(self) -> None:
        self.weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.master = nn.Parameter(self.weight.detach().float())
        self.optimizer = optim.SGD([self.master], lr=0.1)
        self.models: list[Tensor] = []
        self.found = MasterWeights(lambda: self.models)

    def step(self, *, optimizer: optim.Optimizer | None = None) -> bool:
        """A backward, the gradient's copy, and a step."""
        self.weight.sum().backward()
        self.found.backward_over()
        assert self.weight.grad is not None
        self.master.grad, self.weight.grad = self.weight.grad.float(), None
        is_found = self.found.stepping(optimizer or self.optimizer)
        (optimizer or self.optimizer).step()
        self.master.grad = None
        return is_found


def test_a_copy_that_gets_its_gradient_after_a_backward_is_found_in_the_second_step() -> None:
    program = Program()
    program.models = [program.weight]
    assert [program.step() for _ in range(4)] == [False, True, False, False]
    assert [tensor is program.master for tensor in program.found.of(program.optimizer)] == [True]


def test_what_gets_its_gradient_from_backward_is_none_also_where_no_model_has_it() -> None:
    """As in a program without modules."""
    program = Program()
    optimizer = optim.SGD([program.weight], lr=0.1)
    for _ in range(4):
        program.weight.sum().backward()
        program.found.backward_over()
        assert not program.found.stepping(optimizer)
        optimizer.zero_grad()
    assert program.found.of(optimizer) == []


def test_what_a_model_has_is_none_also_where_its_gradient_is_given_to_it_after_backward() -> None:
    """As hooks do that reduce gradients elsewhere."""
    program = Program()
    program.models = [program.master]
    assert not any(program.step() for _ in range(4))


def test_a_gradient_that_stays_says_nothing() -> None:
    program = Program()
    for _ in range(4):
        program.found.backward_over()
        program.master.grad = torch.ones(3)
        assert not program.found.stepping(program.optimizer)
        program.optimizer.step()


def test_what_has_no_gradient_in_some_steps_is_found_once_it_has_one() -> None:
    program = Program()
    program.step()
    program.found.backward_over()
    assert not program.found.stepping(program.optimizer)
    assert program.step()


def test_master_weights_of_another_optimizer_are_its_own() -> None:
    program = Program()
    other = optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1)
    for _ in range(3):
        program.step()
        program.found.stepping(other)
    assert len(program.found.of(program.optimizer)) == 1
    assert program.found.of(other) == []
