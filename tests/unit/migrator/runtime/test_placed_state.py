"""Optimizer state lies where there is room for it, whether it is made in a step or loaded before one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn, optim

from torch_tiers.allocator.pages import StateRoom
from torch_tiers.migrator.runtime import optimizer_loads, placed_state
from torch_tiers.migrator.runtime.placed_state import FIRST_STEPS, PlacedState
from torch_tiers.migrator.state import parameter_state

BEFORE = {0: StateRoom(1, 9)}  # what is there before training leaves
RECORDED = {0: StateRoom(5, 9)}  # what a recorded iteration leaves
LACKED = 7  # bytes, in that
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


class Program:
    """An optimizer with two parameters, on a GPU that is none."""

    def __init__(self) -> None:
        self.said: list[Any] = []  # to the allocator
        self.room_made: list[int] = []
        self.recorded = False
        self.is_alone = True
        self.in_hbm = 100  # bytes of state that may be demoted
        self.lacks = 0  # bytes, with all that is known as state moved
        self.known: set[int] = set()
        self.of_models: list[torch.Tensor] = []
        self.optimizer = self.another()
        pages: Any = SimpleNamespace(
            state=lambda on, room=None: self.said.append(room if on else False),
            residence=lambda _: self,
        )
        savers: Any = SimpleNamespace(thread=SimpleNamespace(saver=None))
        self.nvme = mock.Mock()
        self.nvme.put_loaded = lambda optimizer, parameter, value: value
        self.placed = PlacedState(lambda: pages, savers, self._moving, lambda: self.of_models, self.nvme)

    @contextmanager
    def _moving(self) -> Iterator[bool]:
        yield self.is_alone

    def make_room(self, nbytes: int) -> int:
        self.room_made.append(nbytes)
        return self.lacks

    def state_blocks(self) -> set[int]:
        return self.known

    def demotable(self) -> int:
        return self.in_hbm

    def count_state(self) -> None:
        self.said.append("counted")

    def another(self) -> optim.Optimizer:
        parameters = [nn.Parameter(torch.ones(3)) for _ in range(2)]
        for parameter in parameters:
            parameter.grad = torch.ones(3)
        return optim.Adam(parameters)

    def step(self, steps: int = 0) -> None:
        self.placed.stepping(self.optimizer, steps)
        self.optimizer.step()
        self.placed.stepped(self.optimizer)


@pytest.fixture
def program() -> Iterator[Program]:
    made = Program()
    with (
        mock.patch.object(placed_state, "rooms_before_training", lambda *_: BEFORE),
        mock.patch.object(placed_state, "state_rooms", lambda *_: RECORDED if made.recorded else {}),
        mock.patch.object(placed_state, "shortages", lambda *_: {CPU: LACKED}),
    ):
        yield made


def test_state_that_the_first_step_makes_has_the_room_that_a_recorded_iteration_leaves(program: Program) -> None:
    program.recorded = True
    program.step()
    assert program.said == [RECORDED, False]
    assert program.room_made == [], "none of it was there before"


def test_state_without_room_in_dram_is_expected_once(program: Program) -> None:
    program.recorded = True
    for steps in range(2):
        program.step(steps)
    program.nvme.expect.assert_called_once_with(program.optimizer, mock.ANY, RECORDED)


def test_state_that_is_loaded_leaves_room_for_gradients_and_makes_room_once_an_iteration_was_recorded(
    program: Program,
) -> None:
    other = program.another()
    other.step()
    with program.placed.loading(program.optimizer, None):
        program.optimizer.load_state_dict(other.state_dict())
    assert program.said == [BEFORE, False]
    program.recorded = True
    for steps in range(3):
        program.step(steps)
    assert program.room_made == [LACKED], "once"


def test_state_that_a_step_before_training_makes_makes_room_later(program: Program) -> None:
    """As PyTorch steps with gradients of zero before it loads a distributed checkpoint."""
    program.step()
    assert (program.said, program.room_made) == ([{}, False], [])
    program.recorded = True
    program.step(1)
    assert program.room_made == [LACKED]


def test_nothing_moves_while_another_thread_trains(program: Program) -> None:
    program.step()
    program.recorded, program.is_alone = True, False
    program.step(1)
    assert program.room_made == []


def test_what_could_not_move_moves_in_a_later_step(program: Program) -> None:
    program.step()
    program.recorded, program.is_alone = True, False
    program.step(1)
    program.is_alone = True
    program.step(2)
    assert program.room_made == [LACKED]


def test_state_that_is_loaded_once_more_makes_room_once_more(program: Program) -> None:
    program.recorded = True
    program.step()
    with program.placed.loading(program.optimizer, None):
        program.optimizer.load_state_dict(program.optimizer.state_dict())
    program.step(1)
    assert program.room_made == [LACKED]


def test_what_comes_after_a_step_that_raises_is_no_state_from_the_next_forward_on(program: Program) -> None:
    program.placed.stepping(program.optimizer, 0)
    program.placed.over()
    assert program.said == [{}, False]


def test_a_load_within_a_step_does_not_end_the_steps_state(program: Program) -> None:
    program.placed.stepping(program.optimizer, 0)
    with program.placed.loading(program.another(), None):
        pass
    assert program.said == [{}, BEFORE]
    program.placed.stepped(program.optimizer)
    assert program.said == [{}, BEFORE, False]


def test_state_that_was_on_the_gpu_before_it_was_loaded_is_taken_in_as_far_as_hbm_lacks_room(program: Program) -> None:
    program.step()
    tensors = [value for state in program.optimizer.state.values() for value in state.values() if value.ndim]
    before = [(tensor.data_ptr(), tensor.clone()) for tensor in tensors]
    program.known = {before[0][0]}
    program.lacks = tensors[0].nbytes + 1  # two of the three that are not known
    program.recorded = True
    program.said.clear()
    with mock.patch.object(parameter_state, "LEAST", 8):  # more than a number of steps
        program.placed.stepping(program.optimizer, FIRST_STEPS)
    assert program.said == [{None: StateRoom(0, program.lacks)}, False, "counted"]
    assert [tensor.data_ptr() != address for tensor, (address, _) in zip(tensors, before, strict=True)].count(True) == 2
    assert tensors[0].data_ptr() == before[0][0], "it is known, and moves as pages do"
    assert all(torch.equal(tensor, copy) for tensor, (_, copy) in zip(tensors, before, strict=True))


def test_master_weights_are_taken_in_before_the_first_step_makes_its_state(program: Program) -> None:
    masters = program.optimizer.param_groups[0]["params"]
    addresses = [master.data_ptr() for master in masters]
    program.of_models = [master.detach().bfloat16() for master in masters]
    program.recorded, program.lacks = True, 1 << 20
    with mock.patch.object(parameter_state, "LEAST", 8):
        program.placed.stepping(program.optimizer, 0)
        assert all(master.data_ptr() not in addresses for master in masters)
        assert program.placed.masters(program.optimizer) == set(map(id, masters))
        program.step(1)
    assert program.room_made == [LACKED], "once"


def test_master_weights_that_hbm_will_have_no_room_for_are_taken_in_before_the_first_forward(program: Program) -> None:
    masters = program.optimizer.param_groups[0]["params"]
    addresses = [master.data_ptr() for master in masters]
    program.lacks = 1 << 20
    with (
        mock.patch.object(parameter_state, "LEAST", 8),
        mock.patch.object(placed_state, "shortages_before_training", lambda *_: {CPU: LACKED}),
    ):
        program.placed.make_room_before_training()
        assert not program.room_made, "no model has 16-bit weights"
        program.of_models = [master.detach().bfloat16() for master in masters]
        program.placed.make_room_before_training()
    assert all(master.data_ptr() not in addresses for master in masters)


def test_state_is_demoted_as_the_next_forward_begins(program: Program) -> None:
    program.step()
    assert program.placed.demotable_bytes(GPU) == 100
    assert program.placed.demote(GPU, 60) == 60 and not program.room_made
    assert program.placed.demotable_bytes(GPU) == program.placed.demote(GPU, 60) == 0, "until that is done"
    for _ in range(2):
        program.placed.forward_begins()
    assert program.room_made == [60]
    assert program.placed.demotable_bytes(GPU) == 100


def test_no_more_state_is_demoted_than_there_is(program: Program) -> None:
    assert program.placed.demote(GPU, 101) == 100


def test_state_is_demoted_later_if_another_thread_comes_that_may_use_it(program: Program) -> None:
    program.placed.demote(GPU, 60)
    program.is_alone = False
    program.placed.forward_begins()
    assert not program.room_made
    program.is_alone = True
    program.placed.forward_begins()
    assert program.room_made == [60]


def test_state_that_dram_has_no_room_for_stays_and_that_is_said(
    program: Program, caplog: pytest.LogCaptureFixture
) -> None:
    program.lacks = 20
    program.placed.demote(GPU, 60)
    program.placed.forward_begins()
    assert "raise TIERS_DRAM" in caplog.text


def test_no_state_is_demoted_while_another_thread_trains(program: Program) -> None:
    program.is_alone = False
    assert program.placed.demotable_bytes(GPU) == program.placed.demote(GPU, 60) == 0


def test_no_state_is_demoted_that_would_be_updated_where_it_lies(program: Program) -> None:
    """As LBFGS does, which makes no step in parts."""
    program.optimizer = optim.LBFGS([nn.Parameter(torch.ones(3))])
    program.placed.stepped(program.optimizer)
    assert program.placed.demotable_bytes(GPU) == program.placed.demote(GPU, 1) == 0


def test_no_state_is_demoted_if_steps_are_made_within_backward(program: Program) -> None:
    """Where what comes to HBM for them would need the room that it left."""
    weight = nn.Parameter(torch.ones(3))
    weight.register_post_accumulate_grad_hook(lambda _: program.step())
    weight.sum().backward()
    assert program.placed.demotable_bytes(GPU) == 0


def test_what_another_tensor_has_the_memory_of_is_not_taken_in(program: Program) -> None:
    """As the tensor that the program has made a parameter of: it would keep what was."""
    first, second = program.optimizer.param_groups[0]["params"]
    program.of_models = [master.detach().bfloat16() for master in (first, second)]
    alias = first.detach()
    program.recorded, program.lacks = True, 1 << 20
    with mock.patch.object(parameter_state, "LEAST", 8):
        before = first.data_ptr(), second.data_ptr()
        program.placed.stepping(program.optimizer, 0)
    assert alias.data_ptr() == first.data_ptr() == before[0]
    assert second.data_ptr() != before[1]


def test_what_later_steps_allocate_is_no_state(program: Program) -> None:
    program.step()
    program.said.clear()
    program.step(FIRST_STEPS)
    assert not any(program.said)


def test_what_comes_after_a_load_that_fails_is_no_state(program: Program) -> None:
    with pytest.raises(ValueError, match="groups"), program.placed.loading(program.optimizer, None):
        program.optimizer.load_state_dict({"state": {}, "param_groups": []})
    assert program.said == [BEFORE, False]


def test_pytorchs_load_is_within_our_scope_until_that_is_undone(program: Program) -> None:
    plain, within = optim.Optimizer.load_state_dict, list[optim.Optimizer]()
    loaded = list[torch.Tensor]()

    def take(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        loaded.append(parameter)
        return value + 1

    @contextmanager
    def loading(optimizer: optim.Optimizer, given: object) -> Iterator[optimizer_loads.ReplaceLoaded]:
        assert given is saved
        within.append(optimizer)
        yield take

    program.step()
    saved = program.optimizer.state_dict()
    first = program.optimizer.param_groups[0]["params"][0]
    before = program.optimizer.state[first]["exp_avg"].clone()
    optimizer_loads.install(loading)
    try:
        kept = program.optimizer.load_state_dict
        kept(saved)
    finally:
        optimizer_loads.uninstall()
    assert torch.equal(program.optimizer.state[first]["exp_avg"], before + 1)
    kept(saved)
    assert torch.equal(program.optimizer.state[first]["exp_avg"], before)
    assert within == [program.optimizer]
    assert set(map(id, loaded)) == set(map(id, program.optimizer.param_groups[0]["params"]))
    assert optim.Optimizer.load_state_dict is plain
