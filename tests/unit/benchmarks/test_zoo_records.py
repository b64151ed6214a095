"""Forwards of the zoo's programs are recorded as a mode in Python sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks.zoo.program import PROGRAMS, Program, Unavailable, maker, ranks
from torch_tiers.migrator.tape.check import Call, Listing, comparable
from torch_tiers.migrator.tape.recorder import Recorder, load
from torch_tiers.places import cache_directory


@pytest.fixture(scope="module")
def recorder() -> Recorder:
    loaded = load(cache_directory())
    assert isinstance(loaded, Recorder)
    return loaded


def after_two_steps(name: str) -> Program:
    """A program that has made at first use what it makes."""
    torch.manual_seed(0)
    program = maker(name)("cpu", "cpu", False)
    program.train(2, lambda loss: None)
    return program


def forward_of(program: Program, listed: Callable[[], list[Call] | None]) -> list[Call]:
    """What there was of operators as the first backward of a step began: under a mode PyTorch has other backwards."""
    plain, found = torch.autograd.backward, list[list[Call] | None]()

    def backward(*args: Any, **kwargs: Any) -> None:
        found.append(listed())
        plain(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.autograd, "backward", backward)
        program.train(1, lambda loss: None)
    first = found[0]
    assert first is not None and len(first) > 20
    return comparable(first)


@pytest.mark.parametrize("name", [name for name in PROGRAMS if ranks(name) == 1])
def test_a_forward_is_recorded_as_a_mode_sees_it(recorder: Recorder, name: str) -> None:
    try:
        program = after_two_steps(name)
    except Unavailable as error:
        pytest.skip(str(error))
    with Listing() as listing:
        expected = forward_of(program, lambda: [*listing.calls])
    program = after_two_steps(name)  # as what a step does may depend on weights
    with recorder.with_views():
        recorder.begin()
        found = forward_of(program, recorder.listed)
        recorder.stop()
    assert found == expected
