from __future__ import annotations

from itertools import accumulate

import pytest

from torch_tiers.migrator.runtime import steps
from torch_tiers.migrator.runtime.steps import StepTimes

NONE = {"median": None, "low": None, "high": None, "steps": 0}


def timed(*took: float) -> StepTimes:
    """Of steps that took so many seconds."""
    times, now = StepTimes(), 0.0
    times.step(now)
    for seconds in took:
        now += seconds
        times.step(now)
    return times


def test_one_step_has_no_duration() -> None:
    times = timed()
    assert times.count == 1
    assert times.summary() == {"median": None, "min": None, "max": None, "settled": NONE}


def test_durations_lie_between_the_ends_of_steps() -> None:
    times = timed(1.0, 3.0, 2.0)
    assert times.count == 4
    assert times.summary() == {"median": 2.0, "min": 1.0, "max": 3.0, "settled": NONE}


def test_how_a_program_is_now_is_the_median_of_its_last_few_steps() -> None:
    assert StepTimes().lately() is None
    assert timed(*[9.0] * 50, *[2.0] * (steps.LATELY // 2 + 1)).lately() == 2.0


def test_the_median_is_of_recent_steps_and_the_extremes_of_all() -> None:
    times = timed(100.0, 0.5, *[1.0] * (steps.REMEMBERED + 1))
    assert times.summary() == {"median": 1.0, "min": 0.5, "max": 100.0, "settled": NONE}
    assert times.count == steps.REMEMBERED + 4


def test_steps_are_settled_that_begin_under_the_last_plan() -> None:
    """Not the one in which it comes: that began under another, and adopts it."""
    times = StepTimes()
    now, settled = 0.0, []
    for took in (9.0, 8.0, 7.0, 1.0, 3.0, 2.0):
        times.step(now)
        now += took
        if took in (9.0, 8.0):  # at the end of a step, and of the next
            times.planned()
        settled.append(times.summary()["settled"])
    times.step(now)
    assert settled == [NONE] * 3 + [
        {"median": 7.0, "low": 7.0, "high": 7.0, "steps": 1},
        {"median": 4.0, "low": 1.0, "high": 7.0, "steps": 2},
        {"median": 3.0, "low": 1.0, "high": 7.0, "steps": 3},
    ]
    assert times.summary()["settled"] == {"median": 2.5, "low": 1.0, "high": 7.0, "steps": 4}


@pytest.mark.parametrize(("usual", "low", "high"), [(3, 0.5, 9.0), (18, 1.0, 1.0), (38, 1.0, 1.0)])
def test_nine_of_ten_settled_steps_lie_between_low_and_high(usual: int, low: float, high: float) -> None:
    times = StepTimes()
    times.planned()
    for now in accumulate([9.0, *[1.0] * usual, 0.5], initial=0.0):
        times.step(now)
    settled = times.summary()["settled"]
    assert (settled["low"], settled["high"], settled["steps"]) == (low, high, usual + 2)


def test_no_more_settled_steps_are_told_than_are_remembered() -> None:
    times = StepTimes()
    times.planned()
    for now in range(steps.REMEMBERED + 10):
        times.step(float(now))
    every = dict.fromkeys(("median", "low", "high"), 1.0)
    assert times.summary()["settled"] == every | {"steps": steps.REMEMBERED}
