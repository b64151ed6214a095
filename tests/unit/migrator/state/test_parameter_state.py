"""What of an optimizer's state may come to HBM: plain tensors that are not small and have a storage for themselves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn, optim

from torch_tiers.migrator.state.parameter_state import LEAST, PARAMETER, all_but, all_states, by_group, those_in_dram

COUNT = LEAST // 4


def stepped(*parameters: nn.Parameter) -> optim.Adam:
    optimizer = optim.Adam([{"params": parameters[:1]}, {"params": parameters[1:]}])
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def weight(count: int = COUNT) -> nn.Parameter:
    return nn.Parameter(torch.ones(count))


def everywhere(tensor: Tensor) -> bool:
    """All state lies in DRAM, and no parameter does."""
    return not isinstance(tensor, nn.Parameter)


def test_moments_may_come_and_the_number_of_steps_may_not() -> None:
    (found,) = those_in_dram(all_states(stepped(weight())), everywhere)
    assert found.tensors.keys() == {"exp_avg", "exp_avg_sq"}
    assert found.nbytes == 2 * LEAST


def test_a_master_weight_may_come_and_no_other_parameter() -> None:
    optimizer = stepped(one := weight(), weight())
    (found,) = those_in_dram(
        all_states(optimizer, frozenset({id(one)})), lambda tensor: isinstance(tensor, nn.Parameter)
    )
    assert found.tensors == {PARAMETER: one} and found.nbytes == LEAST


@pytest.mark.parametrize("shape", [(COUNT,), (1, COUNT)])
def test_a_parameter_stays_whose_copy_could_not_have_its_gradient(shape: tuple[int, ...]) -> None:
    one = weight()
    one.grad_dtype = torch.bfloat16 if shape == (COUNT,) else torch.float32
    one.grad = torch.ones(COUNT, dtype=one.grad_dtype)
    one.data = one.data.view(shape)
    optimizer = optim.SGD([one])
    assert not list(those_in_dram(all_states(optimizer, frozenset({id(one)})), lambda tensor: tensor is one))


def test_small_tensors_stay() -> None:
    assert not list(those_in_dram(all_states(stepped(weight(COUNT - 1))), everywhere))


def test_what_is_conjugated_only_by_name_stays() -> None:
    optimizer = stepped(one := weight())
    optimizer.state[one]["exp_avg"] = torch.ones(COUNT, dtype=torch.complex64).conj()
    (found,) = those_in_dram(all_states(optimizer), everywhere)
    assert list(found.tensors) == ["exp_avg_sq"]


def test_only_what_lies_in_dram_comes() -> None:
    optimizer = stepped(weight(), other := weight())
    moment = optimizer.state[other]["exp_avg"]
    (found,) = those_in_dram(all_states(optimizer), lambda tensor: tensor is moment)
    assert (found.group, found.parameter is other, list(found.tensors)) == (1, True, ["exp_avg"])


def test_views_and_tensors_that_share_a_storage_stay() -> None:
    optimizer = stepped(one := weight())
    both = torch.zeros(2 * COUNT)
    optimizer.state[one]["exp_avg"], optimizer.state[one]["exp_avg_sq"] = both[:COUNT], both[COUNT:]
    assert not list(those_in_dram(all_states(optimizer), everywhere))


def test_parameters_without_a_gradient_are_not_updated() -> None:
    optimizer = stepped(one := weight(), other := weight())
    one.grad = None
    assert [found.parameter is other for found in those_in_dram(all_states(optimizer), everywhere)] == [True]
    assert not list(all_but(all_states(optimizer), those_in_dram(all_states(optimizer), everywhere)))


def test_all_others_are_those_that_have_a_gradient_whatever_state_they_have() -> None:
    optimizer = stepped(one := weight(), weight(1))
    optimizer.add_param_group({"params": [new := weight(3)]})
    new.grad = torch.ones(3)
    streamed = list(those_in_dram(all_states(optimizer), everywhere))
    assert by_group(streamed) == {0: [one]}
    assert list(by_group(all_but(all_states(optimizer), streamed))) == [1, 2]
