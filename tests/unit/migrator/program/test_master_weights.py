"""Copies of 16-bit weights that an optimizer updates are found; what a forward may read never is."""

from __future__ import annotations

import torch
from torch import Tensor, nn, optim
from torch.utils import swap_tensors

from torch_tiers.migrator.program.master_weights import ModelWeights, master_weights


def halves() -> list[Tensor]:
    """The weights of a model: two of one shape, and one in fp32 as norms often are."""
    return [*(nn.Parameter(torch.ones(3, 4, dtype=torch.bfloat16)) for _ in range(2)), nn.Parameter(torch.ones(4))]


def found(updated: list[Tensor], model: list[Tensor]) -> list[bool]:
    """For each of what an optimizer updates, whether it is a master weight."""
    masters = master_weights(optim.SGD(updated, lr=0.1), ModelWeights.among(iter(model)))
    return [any(each is master for master in masters) for each in updated]


def test_copies_are_found_and_not_what_the_model_has() -> None:
    model = halves()
    copies = [nn.Parameter(each.detach().float()) for each in model[:2]]
    assert found([*copies, model[2]], model) == [True, True, False]


def test_of_a_model_without_16_bit_weights_there_are_none() -> None:
    model: list[Tensor] = [nn.Parameter(torch.ones(3, 4))]
    assert found([nn.Parameter(torch.ones(3, 4))], model) == [False]
    assert found([nn.Parameter(torch.ones(3, 4))], []) == [False]


def test_where_there_are_more_of_a_shape_than_weights_a_forward_may_read_some() -> None:
    model = halves()
    assert found([nn.Parameter(torch.ones(3, 4)) for _ in range(3)], model) == [False] * 3


def test_what_lies_on_the_memory_of_a_model_is_none() -> None:
    model = [*halves(), nn.Parameter(torch.ones(3, 4))]
    assert found([nn.Parameter(model[-1].detach())], model) == [False]


def test_what_has_no_memory_of_its_own_is_none() -> None:
    sparse = torch.eye(3, 4).to_sparse().requires_grad_()
    assert found([sparse], halves()) == [False]


def test_nobody_keeps_track_of_a_tensor_that_the_program_swaps() -> None:
    model = halves()
    copy = nn.Parameter(torch.ones(3, 4))
    assert found([copy], model) == [True]
    swap_tensors(copy, nn.Parameter(torch.zeros(3, 4)))
