"""Which state comes to HBM, and by which buffer: on a device whose memory is the host's."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn, optim
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from torch_tiers.allocator.sizes import KiB, MiB
from torch_tiers.migrator.runtime import streamed_state
from torch_tiers.migrator.runtime.devices import Device, lanes
from torch_tiers.migrator.runtime.streamed_state import StreamedState
from torch_tiers.migrator.state import chunks, parameter_state, slices
from torch_tiers.migrator.streams.host import HostCompute
from torch_tiers.migrator.telemetry.counters import Counters

CPU = torch.device("cpu")
NBYTES = 4 * KiB  # of a moment
COUNT = 6  # parameters


class Residence:
    """All lies in DRAM but what is at the addresses `stay`; of a buffer HBM has the bytes `in_hbm`."""

    def __init__(self, stay: set[int]) -> None:
        self.stay = stay
        self.in_hbm: tuple[int, int] | None = None
        self.streamed: dict[int, int] = {}

    def dram_bytes(self, address: int) -> int:
        return 0 if address in self.stay else NBYTES

    def longest_in_hbm(self, address: int, nbytes: int) -> tuple[int, int]:
        return self.in_hbm or (0, nbytes)

    def note_streamed(self, nbytes: dict[int, int]) -> None:
        self.streamed |= nbytes


class Steps:
    """An optimizer, and how its steps are made."""

    def __init__(self, budget: int = 1 * MiB, times: int = 1) -> None:
        torch.manual_seed(0)
        self.parameters = [nn.Parameter(torch.randn(times * NBYTES // 4)) for _ in range(COUNT)]
        self.optimizer = optim.SGD(self.parameters, lr=0.1, momentum=0.9)
        self.residence = Residence({parameter.data_ptr() for parameter in self.parameters})
        self.counters = Counters()
        self.compute = HostCompute(self.counters)
        device = Device(self.compute, *lanes(CPU, ("d2h", "h2d"), self.counters), budget)
        pages = SimpleNamespace(state_in_dram=1, residence=lambda _: self.residence)
        options: Any = SimpleNamespace(pages=lambda: pages)
        devices: Any = SimpleNamespace(opened={CPU: device})
        self.pages = pages
        self.masters = frozenset[int]()
        nvme: Any = SimpleNamespace(states={}, lacks_room=lambda _: False)
        self.steps = StreamedState(lambda: options, devices, self.counters, lambda _: self.masters, nvme)
        self.sizes: list[int] = []  # of parts, in parameters

    def make(self, *, count: int = 2) -> None:
        def step(part: optim.Optimizer) -> None:
            self.sizes.append(len(part.param_groups[0]["params"]))
            part.step()

        for i in range(count):
            torch.manual_seed(i)
            for parameter in self.parameters:
                parameter.grad = torch.randn_like(parameter)
            self.sizes.clear()
            self.steps(self.optimizer, step)

    def have_masters(self) -> None:
        """Take all parameters for master weights, which lie in DRAM."""
        self.residence.stay.clear()
        self.masters = frozenset(map(id, self.parameters))

    @property
    def copied(self) -> int:
        return self.counters.moved.get("state_read", 0)


@pytest.fixture(autouse=True)
def small() -> Iterator[None]:
    with (
        mock.patch.object(parameter_state, "LEAST", 64),
        mock.patch.object(slices, "SLICE", 2 * NBYTES),
        mock.patch.object(streamed_state, "SLICE", 2 * NBYTES),
        mock.patch.object(chunks, "ALIGNED", 256),
        mock.patch.object(streamed_state, "largest", lambda budget: budget // 16),
    ):
        yield


def same_as_plain(steps: Steps, times: int = 1) -> bool:
    plain = Steps(times=times)
    plain.pages.state_in_dram = 0
    plain.make()
    return all(map(torch.equal, steps.parameters, plain.parameters))


def test_state_that_was_made_in_the_first_step_is_streamed_from_the_second_on() -> None:
    steps = Steps()
    steps.make()
    assert steps.copied == COUNT * NBYTES
    assert steps.sizes == [2, 2, 2]
    assert sum(steps.residence.streamed.values()) == COUNT * NBYTES
    assert same_as_plain(steps)


def test_master_weights_that_lie_in_dram_come_with_their_state() -> None:
    steps = Steps()
    steps.have_masters()
    steps.make()
    assert steps.copied == 2 * COUNT * NBYTES, "not in the first step, which makes state for a whole parameter"
    assert steps.sizes == [1] * COUNT
    assert same_as_plain(steps)


@pytest.mark.parametrize("how", [{"fused": True}, {"foreach": True}, {"foreach": False}], ids=str)
def test_what_is_updated_in_a_copy_counts_as_changed_where_plain_pytorch_counts_it(how: dict[str, bool]) -> None:
    """Fused optimizers count nothing, so a graph that is kept may run again after their steps."""

    def changed(in_dram: int) -> list[bool]:
        steps = Steps()
        steps.have_masters()
        steps.pages.state_in_dram = in_dram
        steps.optimizer = optim.AdamW(steps.parameters, **how)
        steps.make()
        before = [parameter._version for parameter in steps.parameters]
        steps.make(count=1)
        assert (steps.copied > 0) == bool(in_dram)
        return [parameter._version > version for parameter, version in zip(steps.parameters, before, strict=True)]

    assert changed(1) == changed(0)


def test_a_gradient_of_another_shape_is_as_good_as_without_tiers() -> None:
    found = []
    for in_dram in (0, 1):
        steps = Steps()
        steps.have_masters()
        steps.pages.state_in_dram = in_dram
        steps.optimizer = optim.SGD(steps.parameters, lr=0.1)
        for parameter in steps.parameters:
            parameter.grad = torch.ones_like(parameter)
            parameter.data = parameter.data[None]
        steps.steps(steps.optimizer, lambda part: part.step())
        found.append(steps.parameters)
    assert all(map(torch.equal, *found))


def test_other_parameters_that_lie_in_dram_are_updated_there() -> None:
    """A forward or a backward may have a copy of one, which only operators tell of what they write."""
    steps = Steps()
    steps.residence.stay.clear()
    steps.make()
    assert steps.copied == COUNT * NBYTES
    assert same_as_plain(steps)


def test_a_step_in_inference_mode_is_as_without_tiers() -> None:
    steps = Steps()
    steps.have_masters()
    with torch.inference_mode():
        steps.make(count=3)
    plain = Steps()
    plain.pages.state_in_dram = 0
    plain.make(count=3)
    assert all(map(torch.equal, steps.parameters, plain.parameters))


def test_where_no_state_lies_in_dram_a_step_is_one() -> None:
    steps = Steps()
    steps.pages.state_in_dram = 0
    steps.make()
    assert (steps.copied, steps.sizes) == (0, [COUNT])


@pytest.mark.parametrize(("first", "nbytes"), [(NBYTES, 3 * NBYTES), (512, NBYTES)])
def test_of_a_buffer_that_lies_on_both_tiers_the_part_in_hbm_is_used(first: int, nbytes: int) -> None:
    steps = Steps()
    steps.residence.in_hbm = first, nbytes
    steps.make()
    assert steps.copied == COUNT * NBYTES
    assert set(steps.sizes) == {1} and len(steps.sizes) >= COUNT, "slices are smaller, and chunks where need be"
    assert same_as_plain(steps)


@pytest.mark.parametrize("nbytes", [0, 512])
def test_where_hbm_has_no_room_for_any_chunk_nothing_is_streamed(nbytes: int) -> None:
    steps = Steps()
    steps.residence.in_hbm = 0, nbytes
    steps.make()
    assert (steps.copied, steps.sizes, steps.residence.streamed) == (0, [COUNT], {})
    assert same_as_plain(steps)


def test_what_is_not_cut_and_larger_than_the_buffer_that_there_is_is_left_out() -> None:
    steps = Steps(budget=16 * 40 * NBYTES, times=20)
    turned = [nn.Parameter(parameter.detach().view(-1, 4).t()) for parameter in steps.parameters[:2]]
    steps.parameters = [*turned, *steps.parameters[2:]]
    steps.optimizer = optim.SGD(steps.parameters, lr=0.1, momentum=0.9)
    steps.residence.in_hbm = 0, 18 * NBYTES  # three slices and more
    steps.make()
    assert steps.copied == 20 * (COUNT - 2) * NBYTES


def test_where_no_tier_has_room_for_the_buffer_the_step_is_made_without_one() -> None:
    steps = Steps()
    empty = steps.compute.empty

    def refuses(nbytes: int) -> torch.Tensor:
        if nbytes:
            raise torch.OutOfMemoryError("every tier is full")
        return empty(nbytes)

    with mock.patch.object(steps.compute, "empty", refuses):
        steps.make()
    assert (steps.copied, steps.sizes) == (0, [COUNT])
    assert same_as_plain(steps)


def test_state_that_takes_too_much_of_the_budget_is_updated_where_it_lies() -> None:
    steps = Steps(budget=16 * (NBYTES - 1))
    steps.make()
    assert (steps.copied, steps.sizes) == (0, [COUNT])


def test_a_parameter_that_is_larger_than_a_slice_comes_in_chunks_whatever_it_takes_of_the_budget() -> None:
    steps = Steps(budget=32 * NBYTES, times=5)
    steps.make()
    assert steps.copied == 5 * COUNT * NBYTES
    assert steps.sizes == [1] * 3 * COUNT, "two chunks of a slice each, and one of the rest"
    assert same_as_plain(steps, times=5)


def test_state_that_a_step_makes_beside_the_programs_own_is_kept() -> None:
    """SGD makes its momentum then; of a chunk it would be no part of the whole."""
    steps, plain = Steps(times=5), Steps(times=5)
    plain.pages.state_in_dram = 0
    for each in (steps, plain):
        for parameter in each.parameters:
            each.optimizer.state[parameter]["average"] = parameter.detach().clone()
        each.make(count=3)
    assert steps.copied == 2 * (2 * 5) * COUNT * NBYTES, "average and momentum, from the second step on"
    for mine, its in zip(steps.parameters, plain.parameters, strict=True):
        assert torch.equal(mine, its)
        momentum = (each.optimizer.state[of]["momentum_buffer"] for each, of in ((steps, mine), (plain, its)))
        assert torch.equal(*momentum)


def test_a_dtensor_that_is_updated_counts_as_changed(mesh: DeviceMesh) -> None:
    steps = Steps()
    shard = DTensor.from_local(torch.randn(NBYTES // 4), mesh, [Shard(0)], run_check=False)
    parameter = nn.Parameter(shard)
    optimizer = optim.SGD([parameter], lr=0.1, momentum=0.9)
    loss = (parameter * shard.detach().requires_grad_()).sum()
    for _ in range(2):
        loss.backward(retain_graph=True)
        parameter.grad, gradient = None, parameter.grad
    parameter.grad = gradient
    optimizer.step()
    version = parameter._version
    steps.steps(optimizer, lambda part: part.step())
    assert steps.copied > 0
    assert parameter._version > version


def test_shards_are_updated_as_plain_tensors(mesh: DeviceMesh) -> None:
    """`foreach` takes no plain tensors together with DTensors, and some of these shards come in chunks."""
    plain, steps = Steps(times=3), Steps(times=3)
    plain.pages.state_in_dram = 0
    plain.make()

    def distributed(shard: torch.Tensor) -> DTensor:
        return DTensor.from_local(shard, mesh, [Shard(0)], run_check=False)

    whole = [nn.Parameter(distributed(parameter.detach())) for parameter in steps.parameters]
    steps.optimizer = optim.SGD(whole, lr=0.1, momentum=0.9, foreach=True)
    for i in range(2):
        torch.manual_seed(i)
        for parameter, shard in zip(whole, steps.parameters, strict=True):
            parameter.grad = distributed(torch.randn_like(shard))
        steps.steps(steps.optimizer, lambda part: part.step())
    assert steps.copied == 3 * COUNT * NBYTES
    assert all(torch.equal(mine.to_local(), its) for mine, its in zip(whole, plain.parameters, strict=True))


def test_a_step_that_is_captured_is_one() -> None:
    steps = Steps()
    with mock.patch.object(steps.compute, "capturing", lambda: True):
        steps.make()
    assert (steps.copied, steps.sizes) == (0, [COUNT])


def test_after_an_error_in_the_midst_of_a_step_the_next_one_is_made() -> None:
    steps = Steps()
    steps.make()

    def fails(part: optim.Optimizer) -> None:
        raise ValueError("in the midst")

    with pytest.raises(ValueError, match="in the midst"):
        steps.steps(steps.optimizer, fails)
    before = steps.copied
    steps.make(count=1)
    assert steps.copied == before + COUNT * NBYTES
    steps.steps.close()
