"""The tape has what a mode in Python sees, and the program computes what it computes without."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.unit.migrator.tape.modes import Model, calls_of
from tests.unit.migrator.tape.programs import PROGRAMS, Program, step
from torch_tiers.migrator.tape.check import Listing, comparable, listed
from torch_tiers.migrator.tape.recorder import Recorder


@pytest.fixture(params=PROGRAMS, ids=lambda make: make.__name__)
def program(request: pytest.FixtureRequest) -> Program:
    make: Callable[[], Program] = request.param
    torch.manual_seed(0)
    made = make()
    step(made)  # what is made at first use, is
    return made


def test_forward_is_recorded_as_a_mode_sees_it(recorder: Recorder, program: Program) -> None:
    forward, _ = program
    with Model() as model:
        forward()
    recorder.begin()
    forward()
    tape = recorder.end()
    assert tape is not None and tape.broken is None
    assert calls_of(tape) == model.calls


def test_backward_is_recorded_as_a_mode_sees_it(recorder: Recorder, program: Program) -> None:
    with Listing() as listing:
        step(program)
    recorder.begin()
    step(program)
    tape = recorder.end()
    assert tape is not None and tape.broken is None
    assert comparable(listed(tape)) == comparable(listing.calls)


def test_results_are_the_same_bit_for_bit(recorder: Recorder, program: Program) -> None:
    expected = step(program)
    for _ in range(3):
        recorder.begin(states=True)
        found = step(program)
        recorder.end()
        assert len(found) == len(expected)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_second_record_is_the_first_again(recorder: Recorder, program: Program) -> None:
    tapes = []
    for _ in range(3):
        recorder.begin()
        step(program)
        tapes.append(recorder.end())
    _, second, third = tapes
    assert second and third
    assert [each.step for each in second.operators] == [each.step for each in third.operators]


def test_operator_takes_less_than_a_kilobyte(recorder: Recorder, program: Program) -> None:
    recorder.begin()
    for _ in range(5):
        step(program)
    tape = recorder.end()
    assert tape is not None and tape.nbytes < 1000 * len(tape.operators)
