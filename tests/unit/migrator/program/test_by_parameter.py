"""A step that is made in parts is the same as a whole one, and only where that holds may it be split."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from torch_tiers.migrator.program.by_parameter import BY_ELEMENT, BY_PARAMETER, makes_state, may_be_split, step_over


def parameters(count: int = 3) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(4, 4)) for _ in range(count)]


def with_gradients(all_parameters: list[nn.Parameter], step: int) -> None:
    torch.manual_seed(step)
    for parameter in all_parameters:
        parameter.grad = torch.randn_like(parameter)


def numbers(optimizer: optim.Optimizer) -> list[Any]:
    return [list(optimizer.state_dict()["state"].values()), [group["params"] for group in optimizer.param_groups]]


@pytest.mark.parametrize("kind", BY_PARAMETER, ids=lambda kind: kind.__name__)
def test_a_step_in_parts_is_a_step(kind: type[optim.Optimizer]) -> None:
    make: Any = kind
    whole, parts = parameters(), parameters()
    of_whole, of_parts = make(whole), make([{"params": parts[:1]}, {"params": parts[1:]}])
    assert may_be_split(of_parts)
    for step in range(4):
        with_gradients(whole, step)
        with_gradients(parts, step)
        of_whole.step()
        for chosen in ({0: parts[:1]}, {1: parts[2:]}, {1: parts[1:2]}):
            step_over(chosen, of_parts, make.step)
    for one, other in zip(whole, parts, strict=True):
        assert torch.equal(one, other)
        for name, value in of_whole.state[one].items():
            assert not isinstance(value, Tensor) or torch.equal(value, of_parts.state[other][name]), name


def test_the_programs_optimizer_is_as_ever_while_a_part_of_it_steps() -> None:
    of = parameters()
    optimizer = optim.SGD([{"params": of[:1], "lr": 0.5}, {"params": of[1:]}], lr=0.1, momentum=0.9)
    before = [group["params"] for group in optimizer.param_groups]
    with_gradients(of, 0)

    def step(part: optim.Optimizer) -> None:
        assert [group["lr"] for group in part.param_groups] == [0.5, 0.1]
        assert [len(group["params"]) for group in part.param_groups] == [0, 1]
        assert all(group["params"] is whole for group, whole in zip(optimizer.param_groups, before, strict=True))
        part.step()

    step_over({1: of[2:]}, optimizer, step)
    assert list(optimizer.state) == [of[2]], "its state is one"


def test_a_step_may_make_state_for_a_parameter_that_has_some() -> None:
    of = parameters(1)
    momentum, none = optim.SGD(of, lr=0.1, momentum=0.9), optim.SGD(of, lr=0.1)
    assert makes_state(momentum, 0, {"average": of[0]})
    assert makes_state(momentum, 0, {"momentum_buffer": None})
    assert not makes_state(momentum, 0, {"momentum_buffer": of[0]})
    assert not makes_state(none, 0, {"average": of[0]})
    assert not makes_state(none, 0, {})
    assert makes_state(optim.Adam(of), 0, {})
    assert not makes_state(optim.Adam(of), 0, {"average": of[0]})


def test_a_part_may_have_another_state() -> None:
    of = parameters()
    optimizer = optim.SGD(of, lr=0.1, momentum=0.9)
    with_gradients(of, 0)
    state: dict[Tensor, Any] = {of[1]: {}}
    step_over({0: of[1:2]}, optimizer, optim.SGD.step, state)
    assert state[of[1]]["momentum_buffer"] is not None
    assert not optimizer.state


def test_what_a_part_has_learned_of_itself_its_optimizer_knows() -> None:
    optimizer = optim.SGD(parameters())

    def warn(part: Any) -> None:
        part.has_warned = True

    step_over({}, optimizer, warn)
    assert vars(optimizer)["has_warned"] is True


class _Mine(optim.SGD):
    """Its update may be of all parameters together."""


def test_an_optimizer_of_the_programs_own_is_not_split() -> None:
    assert not may_be_split(_Mine(parameters(), lr=0.1))
    assert not may_be_split(optim.LBFGS(parameters()))


def test_groups_of_several_devices_or_types_are_not_split() -> None:
    assert not may_be_split(optim.SGD([nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1, device="meta"))]))

    class Special(Tensor):
        pass

    assert not may_be_split(optim.SGD([torch.zeros(1).as_subclass(Special).requires_grad_()]))


def test_what_is_updated_twice_is_not_split() -> None:
    of = parameters()
    with pytest.warns(UserWarning, match="duplicate parameters"):
        assert not may_be_split(optim.SGD([of[0], of[0], of[1]]))
    optimizer = optim.SGD(of, momentum=0.9)
    both = torch.zeros(4, 4)
    for parameter in of[:2]:
        optimizer.state[parameter]["momentum_buffer"] = both
    assert not may_be_split(optimizer)


@pytest.mark.parametrize("source", [0, 1])
def test_a_gradient_on_the_memory_of_a_parameter_is_not_split(source: int) -> None:
    """It changes as that is updated, which happens in a copy."""
    of = parameters()
    with_gradients(of, 0)
    assert may_be_split(optim.AdamW(of))
    of[0].grad = of[source].detach()
    assert not may_be_split(optim.AdamW(of))


def test_an_optimizer_whose_own_method_finds_its_state_is_not_split() -> None:
    optimizer: Any = optim.Adam(parameters())
    optimizer._init_group = optimizer._init_group
    assert not may_be_split(optimizer)


def test_a_group_with_a_sparse_gradient_is_not_split() -> None:
    of = parameters()
    with_gradients(of, 0)
    of[1].grad = torch.eye(4).to_sparse()
    assert not may_be_split(optim.Adagrad(of))


def test_a_step_through_which_gradients_flow_is_not_split() -> None:
    assert not may_be_split(optim.Adam(parameters(), differentiable=True))


def test_copies_of_an_optimizer_may_be_split_as_it_may() -> None:
    assert may_be_split(copy.deepcopy(optim.Adam(parameters())))


def distributed(plain: Tensor, mesh: DeviceMesh, placement: Placement) -> DTensor:
    return DTensor.from_local(plain, mesh, [placement], run_check=False)


# PyTorch refuses Rprop for shards.
@pytest.mark.parametrize(
    "kind", [kind for kind in BY_ELEMENT if kind is not optim.Rprop], ids=lambda kind: kind.__name__
)
@pytest.mark.parametrize("placement", [Shard(0), Replicate()], ids=str)
def test_what_a_rank_has_of_dtensors_is_updated_in_parts(kind: Any, placement: Placement, mesh: DeviceMesh) -> None:
    whole = parameters()
    parts = [nn.Parameter(distributed(parameter.detach().clone(), mesh, placement)) for parameter in whole]
    of_whole, of_parts = kind(whole), kind(parts)
    for step in range(3):
        with_gradients(whole, step)
        for one, other in zip(whole, parts, strict=True):
            assert one.grad is not None
            other.grad = distributed(one.grad, mesh, placement)
        of_whole.step()
        assert may_be_split(of_parts)
        for chosen in (parts[:1], parts[1:]):
            step_over({0: chosen}, of_parts, kind.step)
    for one, other in zip(whole, parts, strict=True):
        assert isinstance(other, DTensor)
        assert torch.equal(one, other.to_local())


def test_a_step_for_which_ranks_communicate_is_not_split(mesh: DeviceMesh) -> None:
    """Each rank would come to the same parameter at another time."""

    shard = Shard(0)

    def sharded(optimizer: Any, gradient: Placement) -> optim.Optimizer:
        parameter = nn.Parameter(distributed(torch.randn(4, 4), mesh, shard))
        parameter.grad = distributed(torch.randn(4 if gradient == shard else 8, 4), mesh, gradient)
        made: optim.Optimizer = optimizer([parameter])
        return made

    assert may_be_split(sharded(optim.AdamW, shard))
    assert not may_be_split(sharded(optim.AdamW, Replicate()))
    assert not may_be_split(sharded(optim.AdamW, Partial()))
    assert not may_be_split(sharded(optim.Adafactor, shard)), "it takes means over rows"
    optimizer = sharded(optim.AdamW, shard)
    optimizer.param_groups[0]["lr"] = distributed(torch.tensor(0.1), mesh, Replicate())
    assert not may_be_split(optimizer), "what each rank has of a parameter is a plain tensor"


def test_plain_and_distributed_parameters_of_one_group_are_not_split(mesh: DeviceMesh) -> None:
    assert not may_be_split(optim.AdamW([*parameters(1), nn.Parameter(distributed(torch.ones(4), mesh, Shard(0)))]))


def test_state_that_has_the_memory_of_what_is_updated_is_not_split() -> None:
    """What is copied back would undo the update."""
    for alias in ("parameter", "gradient"):
        of = parameters(1)
        with_gradients(of, 0)
        optimizer = optim.Adam(of)
        optimizer.step()
        assert may_be_split(optimizer)
        optimizer.state[of[0]]["mine"] = of[0].detach() if alias == "parameter" else of[0].grad
        assert not may_be_split(optimizer), alias


def test_state_may_be_anything() -> None:
    of = parameters(1)
    optimizer = optim.Adam(of)
    state: Any = optimizer.state
    state["epochs"] = 3
    state[of[0]] = {"sparse": torch.eye(2).to_sparse(), "text": "any"}
    assert may_be_split(optimizer)
