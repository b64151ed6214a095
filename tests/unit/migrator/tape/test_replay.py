"""What is made again has the bits that it had: all that autograd saves is dropped, and gradients are the same."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.unit.migrator.tape.blocks import BLOCKS, Dropping
from tests.unit.migrator.tape.programs import Program, step
from torch_tiers.migrator.tape.recorder import Recorder


@pytest.fixture(params=BLOCKS, ids=lambda make: make.__name__)
def program(request: pytest.FixtureRequest) -> Program:
    make: Callable[[], Program] = request.param
    torch.manual_seed(0)
    made = make()
    step(made)  # what is made at first use, is
    return made


def dropping_all(recorder: Recorder, program: Program) -> tuple[Dropping, list[Tensor]]:
    dropping = Dropping(recorder)
    recorder.begin(states=True)
    with dropping.hooks():
        found = step(program)
    tape = recorder.end()
    assert tape is not None and tape.broken is None
    return dropping, found


def test_gradients_of_what_is_made_again_are_the_same(recorder: Recorder, program: Program) -> None:
    _, model = program
    before = copy.deepcopy(model.state_dict())
    expected = step(program) + [each.clone() for each in model.buffers()]
    model.load_state_dict(before)
    dropping, found = dropping_all(recorder, program)
    found += list(model.buffers())
    assert len(found) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert torch.equal(torch.rand(3), _drawn_after(program))
    assert dropping.untrue == []
    assert set(dropping.refused) <= {"some of its bytes were never written"}  # room that oneDNN works in
    assert len(dropping.made) >= 2 and dropping.runs >= 2


def _drawn_after(program: Program) -> Tensor:
    step(program)
    return torch.rand(3)


def test_second_record_has_the_first_one_s_signatures(recorder: Recorder, program: Program) -> None:
    first, _ = dropping_all(recorder, program)
    second, _ = dropping_all(recorder, program)
    assert [each.signature for each in first.made] == [each.signature for each in second.made]
    assert [each.names for each in first.made] == [each.names for each in second.made]
