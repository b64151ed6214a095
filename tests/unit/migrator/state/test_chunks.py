"""A large parameter is updated chunk by chunk, and has the bits that it would have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from torch_tiers.migrator.program.by_parameter import BY_ELEMENT, Step, step_over
from torch_tiers.migrator.state import chunks as of_chunks
from torch_tiers.migrator.state.chunks import chunks
from torch_tiers.migrator.state.parameter_state import ParameterState

SHAPE = 37, 101
KINDS: list[tuple[Any, dict[str, Any]]] = [
    *((kind, {}) for kind in BY_ELEMENT if kind is not optim.SGD),  # which keeps nothing
    *((kind, {"foreach": True}) for kind in BY_ELEMENT if kind is not optim.SGD),
    *((kind, {how: True}) for kind in (optim.Adam, optim.AdamW) for how in ("fused", "amsgrad")),
    *((optim.SGD, {"momentum": 0.9, how: True}) for how in ("foreach", "fused", "nesterov")),
    (optim.SGD, {"momentum": 0.9}),
    (optim.RMSprop, {"momentum": 0.5, "centered": True}),
]


@pytest.fixture(autouse=True)
def small() -> Iterator[None]:
    with mock.patch.object(of_chunks, "ALIGNED", 16):
        yield


def state_of(optimizer: optim.Optimizer, parameter: Tensor) -> ParameterState:
    state = optimizer.state[parameter]
    return ParameterState(0, parameter, state, {name: value for name, value in state.items() if value.ndim})


def with_gradients(parameters: list[nn.Parameter], step: int) -> list[nn.Parameter]:
    torch.manual_seed(step)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return parameters


def adam(parameter: nn.Parameter) -> ParameterState:
    optimizer = optim.Adam(with_gradients([parameter], 0))
    optimizer.step()
    return state_of(optimizer, parameter)


@pytest.mark.parametrize(("kind", "how"), KINDS, ids=str)
def test_a_step_in_chunks_is_a_step(kind: Any, how: dict[str, Any]) -> None:
    torch.manual_seed(0)
    whole = nn.Parameter(torch.randn(SHAPE))
    other = nn.Parameter(whole.detach().clone())
    of_whole, in_parts = kind([whole], **how), kind([other], **how)
    step: Step = getattr(kind.step, "__wrapped__", kind.step)
    for number in range(4):
        with_gradients([whole], number)
        with_gradients([other], number)
        of_whole.step()
        if number == 0:
            in_parts.step()
            continue
        all_ = state_of(in_parts, other)
        parts = chunks(all_, all_.nbytes // 7)
        assert len(parts) >= 7
        for part in parts:
            step_over({0: [part.parameter]}, in_parts, step, {part.parameter: part.state})
    assert torch.equal(whole, other)
    assert (other._version > 0) == (whole._version > 0), "writes count in the parameter's version, as far as any do"
    for name, value in of_whole.state[whole].items():
        kept = in_parts.state[other][name]
        assert torch.equal(value, kept) if isinstance(value, Tensor) else value == kept, name


def test_chunks_are_all_of_it_and_none_is_larger_than_it_may_be() -> None:
    all_ = adam(nn.Parameter(torch.randn(SHAPE)))
    parts = chunks(all_, 4096)
    assert all(part.nbytes <= 4096 for part in parts)
    for name, whole in all_.tensors.items():
        assert torch.equal(torch.cat([part.tensors[name] for part in parts]), whole.flatten())
        assert all(part.tensors[name].untyped_storage()._cdata == whole.untyped_storage()._cdata for part in parts)


def test_what_is_no_larger_stays_whole() -> None:
    all_ = adam(nn.Parameter(torch.randn(SHAPE)))
    assert chunks(all_, all_.nbytes) == [all_]


def test_what_is_not_contiguous_or_has_such_a_gradient_stays_whole() -> None:
    turned = nn.Parameter(torch.randn(SHAPE).t())
    assert len(chunks(adam(turned), 4096)) == 1
    plain = nn.Parameter(torch.randn(SHAPE))
    all_ = adam(plain)
    plain.grad = torch.randn(SHAPE[::-1]).t()
    assert chunks(all_, 4096) == [all_]


def test_what_has_a_gradient_of_another_type_stays_whole() -> None:
    optimizer = optim.SGD([half := nn.Parameter(torch.randn(SHAPE, dtype=torch.bfloat16))], momentum=0.9)
    half.grad = torch.ones_like(half)
    optimizer.step()
    half.grad.data = torch.ones(SHAPE)  # a program may add gradients up in fp32
    all_ = state_of(optimizer, half)
    assert chunks(all_, 4096) == [all_]


def test_what_has_state_of_another_shape_stays_whole() -> None:
    """As of Adafactor, which keeps a number for each row."""
    all_ = adam(nn.Parameter(torch.randn(SHAPE)))
    all_.state["row"] = torch.zeros(SHAPE[0], 1)
    assert chunks(all_, 4096) == [all_]


def test_of_a_dtensor_there_are_plain_chunks_of_what_this_rank_has(mesh: DeviceMesh) -> None:
    """Or none: plain tensors and DTensors are not updated together."""
    shard = torch.randn(SHAPE)
    distributed = nn.Parameter(DTensor.from_local(shard, mesh, [Shard(0)], run_check=False))
    distributed.grad = DTensor.from_local(torch.ones(SHAPE), mesh, [Shard(0)], run_check=False)
    (chunk,) = chunks(ParameterState(0, distributed, {}, {}), 1 << 20)
    assert type(chunk.parameter) is type(chunk.parameter.grad) is Tensor
    assert torch.equal(chunk.parameter, shard.flatten())
    distributed.grad = DTensor.from_local(torch.ones(SHAPE[::-1]).t(), mesh, [Shard(0)], run_check=False)
    assert chunks(ParameterState(0, distributed, {}, {}), 1 << 20) == []
