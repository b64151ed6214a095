"""The host's own time between our hooks, and where it waited for the device."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import pytest

from torch_tiers.migrator.streams.host_clock import HostClock


class Program:
    """A host that works for so long at a time, and a device that passes events when it is told to."""

    def __init__(self, clock: mock.Mock) -> None:
        self._clock = clock
        self._passed: dict[object, float] = {}
        self._ticks: list[Any] = []
        self._busy: list[float] = []
        self._delayed = 0.0
        self._host = HostClock(self._event(0.0), lambda: self._delayed)

    def _event(self, at: float) -> Any:
        event = object()
        self._passed[event] = at
        return event

    def goes_on(self, seconds: float, *, device: float, busy: float = 1.0, ours: float = 0.0) -> None:
        """Work for some seconds, of which the device passes the end at `device`; then we do."""
        self._clock.return_value += seconds
        self._host.arrive()
        self._ticks.append(self._event(device))
        self._busy.append(busy)
        self._host.stretch_over(self._ticks[-1])
        self._clock.return_value += ours
        self._host.depart()

    def is_kept_for_memory(self, seconds: float) -> None:
        """Have pages mapped, in the middle of a stretch."""
        self._clock.return_value += seconds
        self._delayed += seconds

    def busy(self) -> tuple[float, ...]:
        return self._host.busy(self._busy, self._passed.__getitem__)

    def clocks(self) -> tuple[tuple[float, ...], frozenset[int]]:
        return self._host.clocks(self._busy, self._passed.__getitem__, self._ticks)


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Program:
    clock = mock.Mock(return_value=0.0)
    monkeypatch.setattr(time, "perf_counter", clock)
    return Program(clock)


def test_what_hooks_take_is_not_the_program_s_whose_host_is_ahead_and_waits_for_nothing(program: Program) -> None:
    program.goes_on(1.0, device=5.0, ours=3.0)
    program.goes_on(2.0, device=9.0)
    assert program.clocks() == ((1.0, 2.0), frozenset())


def test_a_host_that_finds_a_device_idle_which_was_behind_has_waited_for_it(program: Program) -> None:
    program.goes_on(1.0, device=10.0)  # nine seconds behind
    program.goes_on(12.0, device=13.0, busy=2.0)  # which it is through with at 10, and with what came then at 12
    own, joins = program.clocks()
    assert joins == {1}
    assert own == (1.0, 1.0), "what the device did not hide"


def test_a_host_that_is_slower_than_the_device_all_along_has_not_waited(program: Program) -> None:
    for second in range(1, 5):
        program.goes_on(1.0, device=float(second))
    assert program.clocks() == ((1.0,) * 4, frozenset())


@pytest.mark.parametrize(("passes", "kept", "own"), [(1.0, 4.0, 2.0), (6.0, 5.0, 1.0)], ids=["idle", "idle by then"])
def test_what_pages_take_to_map_is_not_the_program_s_nor_a_wait_for_the_device(
    program: Program, passes: float, kept: float, own: float
) -> None:
    """As to unmap pages is to wait for whoever reads them."""
    program.goes_on(1.0, device=passes)
    program.is_kept_for_memory(kept)
    program.goes_on(own, device=7.0)
    assert program.clocks() == ((1.0, own), frozenset())


@pytest.mark.parametrize(("passes", "takes", "busy"), [(1.0, 7.0, 3.0), (6.0, 2.0, 2.0)])
def test_a_device_that_waits_until_pages_are_mapped_is_not_busy_unless_it_has_enough_to_do(
    program: Program, passes: float, takes: float, busy: float
) -> None:
    program.goes_on(1.0, device=passes)
    program.is_kept_for_memory(4.0)
    program.goes_on(1.0, device=8.0, busy=takes)
    assert program.busy() == (1.0, busy)
