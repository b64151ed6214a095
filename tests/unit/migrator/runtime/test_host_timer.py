"""What an iteration takes the host, and how much of it is ours."""

from __future__ import annotations

import time
from unittest import mock

import pytest

from torch_tiers.migrator.model.timing import HookTime
from torch_tiers.migrator.runtime.host_timer import HostTimer

NOTHING = HookTime(0.0, 0.0, 0.0, 0.0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    clock = mock.Mock(return_value=0.0)
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


def test_an_iteration_counts_from_its_first_forward_on(clock: mock.Mock) -> None:
    host = HostTimer()

    def ours() -> None:
        clock.return_value += 0.5

    clock.return_value = 7.0  # data is loaded
    host.iteration_begins(hooks=NOTHING, blocked=0.0, idle=True)
    host.timed(ours)
    clock.return_value += 2.0
    host.iteration_begins(hooks=HookTime(0.1, 0.0, 0.0, 0.0), blocked=0.0, idle=False)  # of the same iteration
    taken = host.iteration_over(hooks=HookTime(0.125, 0.0625, 0.0, 0.0625), blocked=0.0)
    assert taken is not None
    assert (taken.seconds, taken.ours, taken.idle) == (2.5, 0.75, True)
    assert taken.hooks == HookTime(0.125, 0.0625, 0.0, 0.0625)


def test_what_we_do_between_two_iterations_counts_for_neither(clock: mock.Mock) -> None:
    host = HostTimer()

    def first_forward() -> None:
        clock.return_value += 5.0  # memory is laid out anew
        host.iteration_begins(hooks=NOTHING, blocked=0.0, idle=False)
        clock.return_value += 0.5

    host.timed(first_forward)
    taken = host.iteration_over(hooks=NOTHING, blocked=0.0)
    assert taken is not None
    assert (taken.seconds, taken.ours) == (0.5, 0.5)


def test_waits_within_hooks_are_neither_ours_nor_the_program_s(clock: mock.Mock) -> None:
    host = HostTimer()
    host.iteration_begins(hooks=NOTHING, blocked=3.0, idle=False)
    clock.return_value = 10.0
    taken = host.iteration_over(hooks=HookTime(0.5, 0.0, 0.0, 5.5), blocked=8.0)
    assert taken is not None
    assert (taken.seconds, taken.ours) == (5.0, 1.0)
    assert taken.hooks == HookTime(0.5, 0.0, 0.0, 0.5), "it is groups that are waited for"


def test_nothing_is_told_of_an_iteration_that_has_not_begun(clock: mock.Mock) -> None:
    assert HostTimer().iteration_over(hooks=NOTHING, blocked=0.0) is None
