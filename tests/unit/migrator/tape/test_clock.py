"""When operators are timed, and whose times they are; what they take is for `test_clock_on_gpu.py`."""

from __future__ import annotations

import gc

import torch

from torch_tiers.migrator.tape.clock import OperatorClock
from torch_tiers.migrator.tape.compiled import Compiled
from torch_tiers.migrator.tape.recorder import Recorder


class Library:
    """The native clock, without a device."""

    def __init__(self) -> None:
        self.number = 0
        self.on = False
        self.wanted: list[bool] = []

    def clock_begin(self, device: int, stream: int) -> int:
        if self.on:
            return 0
        self.on = True
        self.number += 1
        return self.number

    def clock_tick(self, stream: int) -> None:
        assert self.on

    def clock_end(self, number: int, is_wanted: bool) -> list[float]:
        assert number == self.number
        self.on = False
        self.wanted.append(is_wanted)
        return [1.0]


def clock() -> tuple[OperatorClock, Library]:
    library = Library()
    return OperatorClock(library, Compiled(library)), library  # type: ignore[arg-type]


def test_the_clock_is_free_again_after_an_end() -> None:
    operators, library = clock()
    times = operators.begin(0, 0)
    assert times is not None and operators.begin(0, 0) is None
    assert times.end() == [1.0] and times.end() == []
    assert library.wanted == [True]
    assert operators.begin(0, 0) is not None


def test_and_when_nobody_has_its_times_any_more() -> None:
    """A session that is closed while it learns drops them."""
    operators, library = clock()
    times = operators.begin(0, 0)
    del times
    gc.collect()
    assert not library.on and library.wanted == [False]
    assert operators.begin(0, 0) is not None


def test_an_end_that_comes_late_ends_nobody_else_s() -> None:
    operators, library = clock()
    first = operators.begin(0, 0)
    assert first is not None
    first.drop()
    second = operators.begin(0, 0)
    first.drop()
    del first
    gc.collect()
    assert second is not None and library.on


def test_without_a_gpu_nothing_is_timed(recorder: Recorder) -> None:
    if not torch.cuda.is_available():
        assert recorder.clock.begin(0, 0) is None
