"""What is made again has the bits that it had: all that autograd saves is dropped, and gradients are the same."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.unit.migrator.tape.blocks import BLOCKS, Dropping, functions_of_its_own, randomized_relu_and_pooling
from tests.unit.migrator.tape.programs import Program, lstm, step
from torch_tiers.migrator.tape.recorder import Recorder

NOT_MADE = {
    lstm: 2,  # room that oneDNN works in
    randomized_relu_and_pooling: 1,  # noise that is saved before it is drawn
    functions_of_its_own: 1,  # an index of Python's numbers
}
"""How many saved tensors have no closure."""


@pytest.fixture(params=BLOCKS, ids=lambda make: make.__name__)
def make(request: pytest.FixtureRequest) -> Callable[[], Program]:
    made: Callable[[], Program] = request.param
    return made


@pytest.fixture
def program(make: Callable[[], Program]) -> Program:
    torch.manual_seed(0)
    made = make()
    step(made)  # what is made at first use, is
    return made


def dropping_all(recorder: Recorder, program: Program, *, notes: bool) -> tuple[Dropping, list[Tensor]]:
    dropping = Dropping(recorder, notes)
    dropping.begin()
    with dropping.hooks():
        found = step(program)
    recorder.stop()
    return dropping, found


@pytest.mark.parametrize("notes", [False, True], ids=["from what was there before", "from what else was saved"])
def test_gradients_of_what_is_made_again_are_the_same(
    recorder: Recorder, make: Callable[[], Program], program: Program, *, notes: bool
) -> None:
    _, model = program
    before = copy.deepcopy(model.state_dict())
    expected = step(program) + [each.clone() for each in model.buffers()]
    model.load_state_dict(before)
    dropping, found = dropping_all(recorder, program, notes=notes)
    found += list(model.buffers())
    assert len(found) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert torch.equal(torch.rand(3), _drawn_after(program))
    assert dropping.untrue == [] and len(dropping.made) >= 2 and dropping.runs >= 2
    assert notes or dropping.refused <= NOT_MADE.get(make, 0)


def _drawn_after(program: Program) -> Tensor:
    step(program)
    return torch.rand(3)


def test_second_record_has_the_first_one_s_signatures(recorder: Recorder, program: Program) -> None:
    first, second = (dropping_all(recorder, program, notes=True)[0] for _ in range(2))
    assert [each.signature for each in first.made] == [each.signature for each in second.made]
    assert [each.names for each in first.made] == [each.names for each in second.made]
