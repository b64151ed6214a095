"""Optimizer state lies where there is room for it, whether it is made in a step or loaded before one."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
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
CPU = torch.device("cpu")


class Program:
    """An optimizer with two parameters, on a GPU that is none."""

    def __init__(self) -> None:
        self.said: list[Any] = []  # to the allocator
        self.room_made: list[int] = []
        self.recorded = False
        self.is_alone = True
        self.read_once: Callable[[], dict[int, int]] = dict
        self.of_models: list[torch.Tensor] = []
        self.optimizer = self.another()
        pages: Any = SimpleNamespace(
            state=lambda on, room=None: self.said.append(room if on else False),
            residence=lambda _: self,
        )
        savers: Any = SimpleNamespace(thread=SimpleNamespace(saver=None))
        self.placed = PlacedState(lambda: pages, savers, self._moving, lambda: self.of_models)

    @contextmanager
    def _moving(self) -> Iterator[bool]:
        yield self.is_alone

    def make_room(self, nbytes: int) -> None:
        self.room_made.append(nbytes)

    def set_read_once(self, blocks: Callable[[], dict[int, int]]) -> None:
        self.read_once = blocks

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


def test_state_that_is_loaded_leaves_room_for_gradients_and_makes_room_once_an_iteration_was_recorded(
    program: Program,
) -> None:
    other = program.another()
    other.step()
    with program.placed.loading(program.optimizer):
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
    with program.placed.loading(program.optimizer):
        program.optimizer.load_state_dict(program.optimizer.state_dict())
    program.step(1)
    assert program.room_made == [LACKED]


def test_what_comes_after_a_step_that_raises_is_no_state_from_the_next_forward_on(program: Program) -> None:
    program.placed.stepping(program.optimizer, 0)
    program.placed.over()
    assert program.said == [{}, False]


def test_a_load_within_a_step_does_not_end_the_steps_state(program: Program) -> None:
    program.placed.stepping(program.optimizer, 0)
    with program.placed.loading(program.another()):
        pass
    assert program.said == [{}, BEFORE]
    program.placed.stepped(program.optimizer)
    assert program.said == [{}, BEFORE, False]


def test_state_that_was_on_the_gpu_before_it_was_loaded_may_lie_in_dram_as_all_state(program: Program) -> None:
    program.step()
    tensors = [value for state in program.optimizer.state.values() for value in state.values() if value.ndim]
    program.recorded = True
    with mock.patch.object(parameter_state, "LEAST", 8):  # more than a number of steps
        program.step(FIRST_STEPS)
        assert program.read_once() == {tensor.data_ptr(): tensor.nbytes for tensor in tensors}
    assert program.room_made == [LACKED]


def test_master_weights_make_room_before_the_first_step_makes_its_state(program: Program) -> None:
    masters = program.optimizer.param_groups[0]["params"]
    program.of_models = [master.detach().bfloat16() for master in masters]
    program.recorded = True
    with mock.patch.object(parameter_state, "LEAST", 8):
        program.placed.stepping(program.optimizer, 0)
        assert program.read_once() == {master.data_ptr(): master.nbytes for master in masters}
        assert program.room_made == [LACKED]
        program.step(1)
    assert program.room_made == [LACKED], "once"


def test_what_is_read_once_is_known_as_long_as_its_optimizer_lives(program: Program) -> None:
    program.step()
    program.recorded = True
    with mock.patch.object(parameter_state, "LEAST", 8):
        program.step(1)
        assert program.read_once()
        program.optimizer = program.another()
        gc.collect()
        assert not program.read_once()


def test_once_it_is_closed_the_allocator_does_not_ask_it_any_more(program: Program) -> None:
    program.step()
    program.recorded = True
    program.step(1)
    program.placed.close()
    assert program.read_once is dict


def test_what_later_steps_allocate_is_no_state(program: Program) -> None:
    program.step()
    program.said.clear()
    program.step(FIRST_STEPS)
    assert not any(program.said)


def test_what_comes_after_a_load_that_fails_is_no_state(program: Program) -> None:
    with pytest.raises(ValueError, match="groups"), program.placed.loading(program.optimizer):
        program.optimizer.load_state_dict({"state": {}, "param_groups": []})
    assert program.said == [BEFORE, False]


def test_pytorchs_load_is_within_our_scope_until_that_is_undone(program: Program) -> None:
    plain, within = optim.Optimizer.load_state_dict, list[optim.Optimizer]()

    @contextmanager
    def loading(optimizer: optim.Optimizer) -> Iterator[None]:
        within.append(optimizer)
        yield

    saved = program.optimizer.state_dict()
    optimizer_loads.install(loading)
    try:
        kept = program.optimizer.load_state_dict
        kept(saved)
    finally:
        optimizer_loads.uninstall()
    kept(saved)
    assert within == [program.optimizer]
    assert optim.Optimizer.load_state_dict is plain
