"""The monitor's thread: it starts, answers, takes little, and hurts nobody; and how it is configured."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.unit.by_hand import eventually
from tests.unit.monitors import Clock, MiB, Spoken, iteration, watch
from torch_tiers.config import Config, ConfigError, MonitorConfig
from torch_tiers.migrator.runtime.backoff import Response
from torch_tiers.migrator.telemetry.transfers import Transfer
from torch_tiers.monitor.build import build, read_curves
from torch_tiers.monitor.thread import Monitor
from torch_tiers.monitor.watch import Watch


def running() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "tiers-monitor"]


def test_the_thread_starts_with_the_first_iteration_and_ends_with_the_session() -> None:
    monitor = Monitor(watch())
    assert not running()
    assert monitor.iteration_over([], {}) == Response()
    assert running()
    monitor.close()
    monitor.close()
    assert not running()


def test_the_thread_answers() -> None:
    clock = Clock()
    watched = watch(clock=clock)
    monitor = Monitor(watched)

    def backed_off() -> bool:
        clock.now += 1
        transfers = [Transfer("h2d", 64 * MiB, 0.0, 3.0)]
        return monitor.iteration_over(transfers, {}).ahead is not None

    assert eventually(backed_off)
    monitor.close()
    assert monitor.iteration_over([], {}) == Response()


def dear(seconds: float) -> Spoken:
    """A sensor whose every look takes so much of a core."""

    def look() -> None:
        begin = time.thread_time()
        while time.thread_time() - begin < seconds:
            pass

    return Spoken(look)


def test_a_sensor_whose_look_is_dear_is_looked_at_less_often() -> None:
    """60 ms, of which 50 may be taken at once, and 2 a second."""
    clock, sensor = Clock(), dear(0.06)
    watched = watch(sensor, clock=clock)
    for _ in range(5):
        iteration(watched, clock)
    assert sensor.reads == 1
    for _ in range(30):
        iteration(watched, clock)
    assert sensor.reads == 2


def test_the_thread_takes_little_of_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_tiers.monitor.watch.PART", 1.0)  # or the sensor would be looked at once
    monkeypatch.setattr("torch_tiers.monitor.watch.EVERY", 0.0)
    sensor = dear(0.02)
    monitor = Monitor(watch(sensor, clock=time.monotonic))
    end = time.monotonic() + 1.0
    while time.monotonic() < end:
        monitor.iteration_over([Transfer("h2d", 64 * MiB, 0.0, 1.0)], {})
        time.sleep(0.005)
    assert 1 <= sensor.reads <= 5, "50 ms at once, and 10 in a second"
    monitor.close()


def test_a_look_that_is_dear_does_not_blind_the_thread() -> None:
    """Its first took 25 ms, and none came for 2.5 s after it: nine steps of a load that began then were one."""
    watched = watch(dear(0.025))
    monitor = Monitor(watched)
    begin = time.monotonic()

    def stepped() -> bool:
        monitor.iteration_over([Transfer("h2d", 64 * MiB, 0.0, 1.0)], {})
        return watched.steps >= 5

    assert eventually(stepped)
    assert time.monotonic() - begin < 2
    monitor.close()


def test_a_thread_that_dies_hurts_nobody(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = watch()
    monitor = Monitor(watched)

    def die() -> Response:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(watched, "tick", die)
    assert eventually(lambda: monitor.iteration_over([], {}) == Response() and not running())
    assert monitor.iteration_over([], {}) == Response()
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == "the monitor has ended, training goes on without it: RuntimeError: out of luck"
    monitor.close()


def test_where_no_thread_can_be_had_training_goes_on(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    monitor = Monitor(watch())
    assert [monitor.iteration_over([], {}) for _ in range(3)] == [Response()] * 3
    monitor.close()
    assert len(caplog.records) == 1


def test_a_thread_that_hangs_holds_nothing_back(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = watch()
    monitor = Monitor(watched)
    go_on = threading.Event()

    def hang() -> Response:
        go_on.wait(30)
        return Response(2)

    monkeypatch.setattr(watched, "tick", hang)
    monitor.iteration_over([], {})
    monitor._response = Response(2)  # what it had said before
    monkeypatch.setattr("torch_tiers.monitor.thread.LOST", 0.05)
    assert eventually(lambda: monitor.iteration_over([], {}) == Response())
    go_on.set()
    monitor.close()


def test_the_monitor_can_be_switched_off() -> None:
    assert build(Config(monitor=MonitorConfig(enabled=False)), []) is None
    assert build(Config(), []) is not None


@pytest.mark.parametrize("kind", ("a fifo", "a device", "endless", "deep"))
def test_a_calibration_is_read_as_far_as_one_can_be_long_and_from_a_file_alone(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "probe.json"
    if kind == "a fifo":
        os.mkfifo(path)
    elif kind == "a device":
        path = Path("/dev/zero")
    elif kind == "endless":
        path.touch()
        os.truncate(path, 1 << 40)
    else:
        path.write_text("[" * 100_000)
    with pytest.raises(ConfigError, match=r"monitor\.calibration"):
        read_curves(path)


def test_a_calibration_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "probe.json"
    with pytest.raises(ConfigError, match=r"monitor\.calibration"):
        build(Config(monitor=MonitorConfig(calibration=path)), [])
    path.write_text("{}")
    with pytest.raises(ConfigError, match="not a report"):
        build(Config(monitor=MonitorConfig(calibration=path)), [])


def test_a_session_runs_its_monitor(caplog: pytest.LogCaptureFixture) -> None:
    import torch

    import torch_tiers as tiers

    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with caplog.at_level(logging.WARNING), tiers.session(policy="move", dram="64MiB") as session:
        for _ in range(3):
            model(torch.ones(64, 64)).sum().backward()
            optimizer.step()
        assert running()
        assert eventually(lambda: session.stats()["monitor"]["steps"] > 0)
    assert not running()
    with tiers.session(policy="move", dram="64MiB", monitor_enabled=False) as session:
        model(torch.ones(64, 64)).sum().backward()
        optimizer.step()
        assert not running()
        assert session.stats()["monitor"] is None


def test_threads_that_end_their_first_iteration_at_once_start_one_monitor() -> None:
    class Sleepy(Watch):
        def __init__(self) -> None:
            self.threads: set[int] = set()

        def feed(self, transfers: Sequence[Transfer], moved: Mapping[str, int]) -> None:
            pass

        def tick(self) -> Response:
            self.threads.add(threading.get_ident())
            return Response()

    def first_iteration(monitor: Monitor, barrier: threading.Barrier) -> None:
        barrier.wait()
        monitor.iteration_over([], {})

    for _ in range(20):
        watch, barrier = Sleepy(), threading.Barrier(4)
        monitor = Monitor(watch)
        with ThreadPoolExecutor(4) as pool:
            for done in [pool.submit(first_iteration, monitor, barrier) for _ in range(4)]:
                done.result()
        assert eventually(lambda watch=watch: watch.threads)  # type: ignore[misc]
        monitor.close()
        assert len(watch.threads) == 1
