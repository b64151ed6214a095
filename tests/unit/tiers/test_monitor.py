from __future__ import annotations

import errno
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from migrator.runtime.backoff import Response
from migrator.telemetry.timeline import Timeline
from migrator.telemetry.transfers import Transfer
from tests.unit.by_hand import eventually
from tiers.cli import top as top_verb
from tiers.cli.main import main
from tiers.config import Config, ConfigError, MonitorConfig
from tiers.monitor.board import Board, read_all
from tiers.monitor.build import build
from tiers.monitor.calibration import Calibration
from tiers.monitor.sensors import Choice, Reading
from tiers.monitor.sensors.copies import Copies
from tiers.monitor.thread import Monitor
from tiers.monitor.verdict import Judge
from tiers.monitor.watch import BLANK, EVERY, Watch

MiB = 1 << 20


class Spoken:
    """A sensor that says what it is told to."""

    name = "spoken"

    def __init__(self, say: Callable[[], Reading | None]) -> None:
        self.say = say
        self.reads = 0

    def why_not(self) -> str | None:
        return None

    def read(self) -> Reading | None:
        self.reads += 1
        return self.say()


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def watch(
    *sensors: Spoken,
    clock: Callable[[], float] | None = None,
    h2d: float = 64.0 * MiB,
    timeline: Timeline | None = None,
) -> Watch:
    calibration = Calibration({"h2d": h2d})
    clock = clock or Clock()
    return Watch(lambda: Choice(sensors, {}), Copies(calibration, clock), Judge(calibration), clock, timeline)


def period(of: Watch, clock: Clock, left: float = 1.0, moved: int = 0) -> Response:
    """A period passes in which the lane gave so much."""
    clock.now += EVERY
    of.feed([Transfer("h2d", 64 * MiB, 0.0, 1 / left)], {"h2d": moved})
    return of.tick()


# ---------------------------------------------------------------------------------------------------- a watch


def test_a_tick_without_a_period_is_no_step() -> None:
    clock = Clock()
    watched = watch(clock=clock)
    period(watched, clock)
    for _ in range(10):
        watched.tick()
    assert watched.steps == 1


def test_steps_that_were_backed_off_are_counted() -> None:
    clock = Clock()
    watched = watch(clock=clock)
    for left in [1.0] * 5 + [0.5] * 10:
        period(watched, clock, left)
    assert watched.summary()["steps"] == 15
    assert 7 <= watched.summary()["backed_off"] <= 9
    assert "saturated, by whom is unknown (" in watched.changes[0]


def test_workers_that_keep_the_cores_busy_are_named() -> None:
    clock = Clock()
    watched = watch(Spoken(lambda: Reading(0.0, {"tree": 14.2, "others": 0.3, "spare": 0.1})), clock=clock)
    for _ in range(10):
        period(watched, clock)
    assert watched.changes[-1].startswith(
        "cores busy with our workers (bandwidth left: h2d 100%; cores busy: 14.2 with"
    )


def test_a_change_of_mind_is_told_to_the_timeline() -> None:
    clock, timeline = Clock(), Timeline()
    watched = watch(clock=clock, timeline=timeline)
    for left in [1.0] * 5 + [0.5] * 10:
        period(watched, clock, left)
    told = [event["args"]["says"] for event in json.loads(timeline.to_json())["traceEvents"] if event["ph"] == "i"]
    assert told == list(watched.changes)


def test_where_the_traffic_is_counted_it_is_said_whose_it_is() -> None:
    clock = Clock()
    watched = watch(Spoken(lambda: Reading(0.0, {"traffic": 100e9})), clock=clock)
    for left in [1.0] * 5 + [0.5] * 10:
        period(watched, clock, left)
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
    period(watched, clock)
    assert watched.sensors == ["copies", "spoken"]
    sensor.say = say
    for _ in range(5):
        period(watched, clock)
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
    period(watched, clock)
    assert watched.refused == {"spoken": "a read took 10.0 s"}


def test_a_sensor_of_the_bus_that_sees_nothing_of_ours_is_dropped() -> None:
    clock = Clock()
    watched = watch(Spoken(lambda: Reading(0.0, {"traffic": 0.0})), clock=clock)
    for k in range(BLANK + 2):
        period(watched, clock, moved=k << 30)
    assert watched.refused == {"spoken": "it sees no traffic while there is ours"}


def test_a_sensor_is_not_asked_with_every_period() -> None:
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
    period(watched, clock)
    sensor.say = lambda: None
    assert "cpu" in watched.state()["values"]
    for _ in range(5):
        period(watched, clock)
    assert "cpu" not in watched.state()["values"]


# --------------------------------------------------------------------------------------------------- a thread


def running() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "tiers-monitor"]


def test_the_thread_starts_with_the_first_period_and_ends_with_the_session() -> None:
    monitor = Monitor(watch())
    assert not running()
    assert monitor.period_over([], {}) == Response()
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
        return monitor.period_over(transfers, {}).ahead is not None

    assert eventually(backed_off)
    monitor.close()
    assert monitor.period_over([], {}) == Response()


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
        period(watched, clock)
    assert sensor.reads == 1
    for _ in range(30):
        period(watched, clock)
    assert sensor.reads == 2


def test_the_thread_takes_little_of_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiers.monitor.watch.PART", 1.0)  # or the sensor would be looked at once
    monkeypatch.setattr("tiers.monitor.watch.EVERY", 0.0)
    sensor = dear(0.02)
    monitor = Monitor(watch(sensor, clock=time.monotonic))
    end = time.monotonic() + 1.0
    while time.monotonic() < end:
        monitor.period_over([Transfer("h2d", 64 * MiB, 0.0, 1.0)], {})
        time.sleep(0.005)
    assert 1 <= sensor.reads <= 5, "50 ms at once, and 10 in a second"
    monitor.close()


def test_a_look_that_is_dear_does_not_blind_the_thread() -> None:
    """Its first took 25 ms, and none came for 2.5 s after it: nine steps of a load that began then were one."""
    watched = watch(dear(0.025))
    monitor = Monitor(watched)
    begin = time.monotonic()

    def stepped() -> bool:
        monitor.period_over([Transfer("h2d", 64 * MiB, 0.0, 1.0)], {})
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
    assert eventually(lambda: monitor.period_over([], {}) == Response() and not running())
    assert monitor.period_over([], {}) == Response()
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
    assert [monitor.period_over([], {}) for _ in range(3)] == [Response()] * 3
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
    monitor.period_over([], {})
    monitor._response = Response(2)  # what it had said before
    monkeypatch.setattr("tiers.monitor.thread.LOST", 0.05)
    assert eventually(lambda: monitor.period_over([], {}) == Response())
    go_on.set()
    monitor.close()


# ---------------------------------------------------------------------------------------------------- a board


def test_a_board_shows_the_last_state_and_goes_with_its_process(tmp_path: Path) -> None:
    board = Board(tmp_path)
    board.write({"pid": 1, "text": "long" * 100})
    board.write({"pid": 1})
    assert read_all(tmp_path) == [{"pid": 1}]
    board.close()
    board.close()
    assert list(tmp_path.iterdir()) == []


def test_boards_are_private(tmp_path: Path) -> None:
    board = Board(tmp_path)
    board.write({})
    (path,) = tmp_path.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    board.close()


def test_what_the_dead_leave_is_removed(tmp_path: Path) -> None:
    code = "import os, sys, pathlib; from tiers.monitor.board import Board\n"
    code += "Board(pathlib.Path(sys.argv[1])).write({'pid': 7}); os._exit(1)"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert len(list(tmp_path.iterdir())) == 1
    assert read_all(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_a_new_board_removes_what_the_dead_leave(tmp_path: Path) -> None:
    (tmp_path / "monitor-1-dead").write_text("{}")
    board = Board(tmp_path)
    board.write({})
    assert len(list(tmp_path.iterdir())) == 1
    board.close()


def test_a_fork_neither_keeps_nor_removes_its_parents_board(tmp_path: Path) -> None:
    board = Board(tmp_path)
    board.write({"pid": 1})
    if (child := os.fork()) == 0:
        board.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert read_all(tmp_path) == [{"pid": 1}]
    board.close()


def test_a_board_that_is_no_state_is_passed_over(tmp_path: Path) -> None:
    board = Board(tmp_path)
    board.write({})
    assert board._file is not None
    os.pwrite(board._file, b"[1,", 0)
    assert read_all(tmp_path) == []
    board.close()


def test_where_nobody_can_write_the_monitor_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    monitor = Monitor(watch(), Board(tmp_path / "nowhere"))
    monitor.period_over([], {})
    assert eventually(lambda: monitor.watch.steps > 0)
    monitor.close()
    assert not caplog.records


# -------------------------------------------------------------------------------------------------- tiers top


@pytest.fixture
def shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Board:
    """The board of a program beside a load."""
    monkeypatch.delenv("TIERS_LEDGER")
    monkeypatch.setattr(top_verb, "LEDGERS", (tmp_path,))
    directory = tmp_path / f"tiers-{os.geteuid()}"
    directory.mkdir()
    clock = Clock()
    watched = watch(Spoken(lambda: Reading(0.0, {"own": 1.0, "tree": 7.5, "others": 0.2})), clock=clock)
    for k, left in enumerate([1.0] * 5 + [0.5] * 10):
        period(watched, clock, left, moved=k * 2_500_000_000)
    board = Board(directory)
    board.write({"pid": 4711, "at": 0.0, "program": "train.py --fast", **watched.state()})
    return board


def test_top_shows_lanes_traffic_verdict_and_what_was_done(shown: Board, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--once"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "4711: train.py --fast" in out
    assert "memory bus saturated, by whom is unknown, 50% of the bus left" in out
    assert "backed off to 25%: 8 groups ahead, plans count on what is left" in out
    assert "2.5 GB/s" in out
    assert "7.5 workers" in out
    shown.close()


def test_top_as_json_is_the_state(shown: Board, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--json"]) == 0
    (program,) = json.loads(capsys.readouterr().out)["programs"]
    assert program["verdict"]["state"] == "saturated"
    assert program["response"]["plan"]["h2d"] == pytest.approx(0.5, abs=0.1)
    assert program["sensors"] == ["copies", "spoken"]
    shown.close()


def test_top_looks_where_the_ledger_is_named(
    shown: Board, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(top_verb, "LEDGERS", (tmp_path / "nowhere",))
    monkeypatch.setenv("TIERS_LEDGER", str(tmp_path / f"tiers-{os.geteuid()}"))
    assert main(["top", "--once"]) == 0
    assert "4711" in capsys.readouterr().out
    shown.close()


def test_top_looks_once_where_nobody_would_see_it_refreshed(shown: Board, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top"]) == 0
    assert capsys.readouterr().out.count("4711: train.py --fast") == 1
    shown.close()


def test_top_looks_once_at_a_terminal_that_only_prints(
    shown: Board, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # passes for a terminal
    monkeypatch.setenv("TERM", "dumb")
    assert main(["top"]) == 0
    assert capsys.readouterr().out.count("4711: train.py --fast") == 1
    shown.close()


def test_of_many_programs_top_shows_a_line_each(shown: Board, capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = top_verb._programs()
    Console(width=200).print(top_verb.brief([program] * 8))
    lines = [line for line in capsys.readouterr().out.splitlines() if "4711" in line]
    assert len(lines) == 8
    assert all(word in lines[0] for word in ("train.py --fast", "by whom is unknown", "2.5 GB/s", "backed off to 25%"))
    shown.close()


def test_top_ends_as_the_other_verbs_where_its_terminal_is_gone(
    shown: Board, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def gone(self: object, *what: object, **how: object) -> None:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    monkeypatch.setenv("FORCE_COLOR", "1")  # passes for a terminal
    monkeypatch.setattr(top_verb.Live, "update", gone)
    stdout = os.dup(1)  # what is left of the output is thrown away, and the tests after this one have some to say
    try:
        with pytest.raises(SystemExit) as ended:
            main(["top"])
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
    assert ended.value.code == 1
    assert capfd.readouterr().err == ""
    shown.close()


def test_top_looks_at_programs_also_where_none_could_begin(
    shown: Board, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TIERS_NVME", "1GiB")
    monkeypatch.setenv("TIERS_NVME_PATH", "/no/such/directory")
    assert main(["top", "--once"]) == 0
    assert "4711" in capsys.readouterr().out
    shown.close()


def test_top_says_when_there_is_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TIERS_LEDGER")
    monkeypatch.setattr(top_verb, "LEDGERS", (tmp_path,))
    assert main(["top", "--once"]) == 0
    assert "no program" in capsys.readouterr().out


# ---------------------------------------------------------------------------------------------- configuration


def test_the_monitor_can_be_switched_off() -> None:
    assert build(Config(monitor=MonitorConfig(enabled=False)), None) is None
    assert build(Config(), None) is not None


def test_a_calibration_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "probe.json"
    with pytest.raises(ConfigError, match=r"monitor\.calibration"):
        build(Config(monitor=MonitorConfig(calibration=path)), None)
    path.write_text("{}")
    with pytest.raises(ConfigError, match="not a report"):
        build(Config(monitor=MonitorConfig(calibration=path)), None)


def test_a_session_runs_its_monitor(caplog: pytest.LogCaptureFixture) -> None:
    import torch

    import tiers

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


def test_threads_that_end_their_first_period_at_once_start_one_monitor() -> None:
    class Sleepy(Watch):
        def __init__(self) -> None:
            self.threads: set[int] = set()

        def feed(self, transfers: Sequence[Transfer], moved: Mapping[str, int]) -> None:
            pass

        def tick(self) -> Response:
            self.threads.add(threading.get_ident())
            return Response()

    def first_period(monitor: Monitor, barrier: threading.Barrier) -> None:
        barrier.wait()
        monitor.period_over([], {})

    for _ in range(20):
        watch, barrier = Sleepy(), threading.Barrier(4)
        monitor = Monitor(watch)
        with ThreadPoolExecutor(4) as pool:
            for done in [pool.submit(first_period, monitor, barrier) for _ in range(4)]:
                done.result()
        assert eventually(lambda watch=watch: watch.threads)  # type: ignore[misc]
        monitor.close()
        assert len(watch.threads) == 1
