from __future__ import annotations

from migrator import steps
from migrator.steps import StepTimes


def test_one_step_has_no_duration() -> None:
    times = StepTimes()
    times.step(5.0)
    assert times.count == 1
    assert times.summary() == {"median": None, "min": None, "max": None}


def test_durations_lie_between_the_ends_of_steps() -> None:
    times = StepTimes()
    for now in (0.0, 1.0, 4.0, 6.0):
        times.step(now)
    assert times.count == 4
    assert times.summary() == {"median": 2.0, "min": 1.0, "max": 3.0}


def test_the_median_is_of_recent_steps_and_the_extremes_of_all() -> None:
    times = StepTimes()
    now = 0.0
    for took in (100.0, 0.5, *[1.0] * (steps.REMEMBERED + 1)):
        times.step(now)
        now += took
    times.step(now)
    assert times.summary() == {"median": 1.0, "min": 0.5, "max": 100.0}
    assert times.count == steps.REMEMBERED + 4
