"""The record has what a mode in Python sees, and the program computes what it computes without."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.unit.migrator.tape.programs import PROGRAMS, Program, step
from torch_tiers.migrator.tape.check import Call, Listing, comparable
from torch_tiers.migrator.tape.recorder import Recorder


@pytest.fixture(params=PROGRAMS, ids=lambda make: make.__name__)
def program(request: pytest.FixtureRequest) -> Program:
    make: Callable[[], Program] = request.param
    torch.manual_seed(0)
    made = make()
    step(made)  # what is made at first use, is
    return made


def recorded(recorder: Recorder, program: Program) -> list[Call]:
    with recorder.with_views():
        recorder.begin()
        step(program)
        calls = recorder.listed()
        recorder.stop()
    assert calls is not None
    return calls


def test_program_is_recorded_as_a_mode_sees_it(recorder: Recorder, program: Program) -> None:
    with Listing() as listing:
        step(program)
    assert comparable(recorded(recorder, program)) == comparable(listing.calls)


def test_results_are_the_same_bit_for_bit(recorder: Recorder, program: Program) -> None:
    expected = step(program)
    for _ in range(3):
        recorder.begin()
        found = step(program)
        recorder.stop()
        assert len(found) == len(expected)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_second_record_is_the_first_again(recorder: Recorder, program: Program) -> None:
    first = recorded(recorder, program)
    assert recorded(recorder, program) == first and recorded(recorder, program) == first
