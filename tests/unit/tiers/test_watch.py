"""A look at all sensors: steps, changes of mind, sensors that fail."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.monitors import Clock, Spoken, iteration, watch
from torch_tiers.migrator.telemetry.timeline import Timeline
from torch_tiers.monitor.sensors import Reading
from torch_tiers.monitor.watch import BLANK, EVERY


def test_a_tick_without_an_iteration_is_no_step() -> None:
    clock = Clock()
    watched = watch(clock=clock)
    iteration(watched, clock)
    for _ in range(10):
        watched.tick()
    assert watched.steps == 1


def test_steps_that_were_backed_off_are_counted() -> None:
    clock = Clock()
    watched = watch(clock=clock)
    for left in [1.0] * 5 + [0.5] * 10:
        iteration(watched, clock, left)
    assert watched.summary()["steps"] == 15
    assert 7 <= watched.summary()["backed_off"] <= 9
    assert "saturated, by whom is unknown (" in watched.changes[0]


def test_workers_that_keep_the_cores_busy_are_named() -> None:
    clock = Clock()
    watched = watch(Spoken(lambda: Reading(0.0, {"tree": 14.2, "others": 0.3, "spare": 0.1})), clock=clock)
    for _ in range(10):
        iteration(watched, clock)
    assert watched.changes[-1].startswith(
        "cores busy with our workers (bandwidth left: h2d 100%; cores busy: 14.2 with"
    )


def test_a_change_of_mind_is_told_to_the_timeline() -> None:
    clock, timeline = Clock(), Timeline()
    watched = watch(clock=clock, timeline=timeline)
    for left in [1.0] * 5 + [0.5] * 10:
        iteration(watched, clock, left)
    told = [event["args"]["says"] for event in json.loads(timeline.to_json())["traceEvents"] if event["ph"] == "i"]
    assert told == list(watched.changes)


def test_where_the_traffic_is_counted_it_is_said_whose_it_is() -> None:
    clock = Clock()
    watched = watch(Spoken(lambda: Reading(0.0, {"traffic": 100e9})), clock=clock)
    for left in [1.0] * 5 + [0.5] * 10:
        iteration(watched, clock, left)
    assert "saturated by others (" in watched.changes[0]


@pytest.mark.parametrize(
    ("say", "reason"),
    [
        (lambda: Reading(0.0, {"traffic": float("nan")}), "it read {'traffic': nan}"),
        (lambda: Reading(0.0, {"traffic": -5.0}), "it read {'traffic': -5.0}"),
        (lambda: Reading(0.0, {"traffic": 1e30}), "it read {'traffic': 1e+30}"),
        (lambda: 1 / 0, "ZeroDivisionError: division by zero"),
        (lambda: Path("/nowhere/at/all").read_text(), "FileNotFoundError"),
    ],
)
def test_a_sensor_that_fails_is_dropped_with_one_line(
    say: Callable[[], Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    sensor = Spoken(lambda: Reading(0.0, {"traffic": 1.0}))
    watched = watch(sensor, clock=clock)
    iteration(watched, clock)
    assert watched.sensors == ["copies", "spoken"]
    sensor.say = say
    for _ in range(5):
        iteration(watched, clock)
    assert watched.sensors == ["copies"]
    assert reason in watched.refused["spoken"]
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("monitor: goes on without its sensor spoken: ")
    assert reason in line


def test_a_sensor_that_stalls_is_dropped() -> None:
    clock = Clock()

    def stall() -> Reading:
        clock.now += 10
        return Reading(0.0, {})

    watched = watch(Spoken(stall), clock=clock)
    iteration(watched, clock)
    assert watched.refused == {"spoken": "a read took 10.0 s"}


def test_a_sensor_of_the_bus_that_sees_nothing_of_ours_is_dropped() -> None:
    clock = Clock()
    watched = watch(Spoken(lambda: Reading(0.0, {"traffic": 0.0})), clock=clock)
    for k in range(BLANK + 2):
        iteration(watched, clock, moved=k << 30)
    assert watched.refused == {"spoken": "it sees no traffic while there is ours"}


def test_a_sensor_is_not_asked_with_every_iteration() -> None:
    clock = Clock()
    sensor = Spoken(lambda: None)
    watched = watch(sensor, clock=clock)
    for _ in range(100):
        clock.now += EVERY / 10
        watched.tick()
    assert 9 <= sensor.reads <= 12


def test_what_a_sensor_said_long_ago_counts_no_more() -> None:
    clock = Clock()
    sensor = Spoken(lambda: Reading(0.0, {"cpu": 0.5}))
    watched = watch(sensor, clock=clock)
    iteration(watched, clock)
    sensor.say = lambda: None
    assert "cpu" in watched.state()["values"]
    for _ in range(5):
        iteration(watched, clock)
    assert "cpu" not in watched.state()["values"]
