"""The sensor of cores: who keeps them busy, and which workers do not rest."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterable
from itertools import pairwise
from random import Random
from types import SimpleNamespace

import psutil
import pytest

from tests.unit.tiers.test_sensors import Ticks, values
from torch_tiers.monitor.sensors import cores
from torch_tiers.monitor.sensors.cores import Cores


def test_cores_tell_own_work_from_that_of_children() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as child:
        sensor = Cores()
        assert sensor.why_not() is None
        sensor.read()
        time.sleep(0.5)
        found = values(sensor.read())
        child.kill()
    assert set(found) == {"own", "tree", "others", "tireless"}
    assert found["tree"] > 0.1
    assert found["own"] < found["tree"]


def looks(sensor: Cores, busy: Iterable[float], monkeypatch: pytest.MonkeyPatch) -> list[float | None]:
    """What children are said to leave, once a second, while so many cores were busy with them."""
    spent, found = 0.0, list[float | None]()
    for taken in (0.0, *busy):
        spent += taken
        monkeypatch.setattr(sensor, "_busy", lambda now=spent: iter((0.0, now, 0.0, now)))
        reading = sensor.read()
        found.append(None if reading is None else reading.values.get("spare"))
    return found[1:]


def test_what_children_leave_of_the_cores_is_the_middle_of_three_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read is there for several steps: one look that is off must not pass for many."""
    monkeypatch.setattr(cores, "cores_of_rank", lambda ranks: 16.0)
    assert looks(Cores(Ticks()), [0, 0, 4, 14, 4, 14, 14], monkeypatch) == [None, None, 1, 0.75, 0.75, 0.125, 0.125]


def test_of_several_ranks_each_has_its_part_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "cores_of_rank", lambda ranks: 16.0 / ranks)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert looks(Cores(Ticks()), [6, 6, 6, 9, 9], monkeypatch)[-3:] == [0.25, 0.25, 0]


class Worker:
    """A child that keeps so many cores busy in the time between two looks, and then is gone."""

    def __init__(self, pid: int, busy: Iterable[float], every: float = 1.0) -> None:
        self.pid, self._busy, self._every, self._spent = pid, iter([0.0, *busy]), every, 100.0

    def cpu_times(self) -> SimpleNamespace:
        for busy in self._busy:
            self._spent += busy * self._every
            return SimpleNamespace(user=self._spent, system=0.0)
        return self._gone()

    def _gone(self) -> SimpleNamespace:
        raise psutil.NoSuchProcess(self.pid)


class Family:
    """A sensor of eight cores, whose process has these children."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *children: Worker, every: float = 1.0) -> None:
        monkeypatch.setattr(cores, "cores_of_rank", lambda ranks: 8.0 / ranks)
        self.now, self.every, self.children = 0.0, every, list(children)
        self.sensor = Cores(lambda: self.now)
        self.listed = 0
        at_rest = SimpleNamespace(user=0.0, system=0.0)
        process = SimpleNamespace(cpu_times=lambda: at_rest, children=self._list, parent=lambda: None)
        monkeypatch.setattr(self.sensor, "_process", process)

    def _list(self, recursive: bool) -> list[Worker]:
        self.listed += 1
        return list(self.children)

    def looks(self, count: int) -> list[float]:
        """The part of the cores that goes to workers which do not rest, look by look."""
        found = []
        for _ in range(count):
            self.now += self.every
            found.append(values(self.sensor.read()).get("tireless", 0.0))
        return found


def begun(family: Family) -> Family:
    family.sensor.read()
    return family


def test_workers_that_hardly_rest_are_told_from_those_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine of sixteen cores busy with copies were no reason to make room, and lost a tenth of what they copied."""
    family = Family(monkeypatch, *(Worker(pid, [busy] * 40) for pid, busy in enumerate((1.0, 0.9, 0.7, 0.1))))
    assert begun(family).looks(40)[-1] == pytest.approx(1.9 / 8, rel=0.01)


@pytest.mark.parametrize("every", [0.5, 1.0, 5.0])
def test_it_is_told_of_a_worker_after_five_looks_and_again_when_it_rests(
    every: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = Family(monkeypatch, Worker(1, [1.0] * 20 + [0.0] * 20, every), every=every)
    found = [part > 0 for part in begun(family).looks(40)]
    assert found == [False] * 4 + [True] * 20 + [False] * 16


def test_workers_that_rest_now_and_then_are_what_they_were(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room that is made for them lets them rest: that must not take it away again. Nor must what differs by chance."""
    random = Random(seed)
    for mean in (0.55, 0.65, 0.7, 0.75):
        worker = Worker(1, [random.gauss(mean, 0.1) for _ in range(2000)])
        found = [part > 0 for part in begun(Family(monkeypatch, worker)).looks(2000)]
        assert sum(now != before for before, now in pairwise(found)) <= 1


def test_of_several_ranks_each_has_workers_for_its_part_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert begun(Family(monkeypatch, Worker(1, [1.0] * 60))).looks(60)[-1] == pytest.approx(1 / 4, rel=0.01)


def test_workers_of_several_threads_count_for_all_the_cores_that_they_keep_busy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert begun(Family(monkeypatch, Worker(1, [4.0] * 60))).looks(60)[-1] == pytest.approx(0.5, rel=0.01)


def test_an_epochs_workers_follow_those_of_the_last_without_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were not seen for ten seconds: the bus passed for free at the beginning of each epoch."""
    family = begun(Family(monkeypatch, Worker(1, [1.0] * 13)))
    found = family.looks(13)
    family.children = [Worker(2, [1.0] * 40)]
    found += family.looks(40)
    assert all(part > 0 for part in found[4:])
    assert family.listed <= 6, "once for those that were gone, and every ten seconds"
    assert max(found) < 1.05 / 8, "they do not count twice"


def test_children_that_are_gone_in_no_time_are_not_looked_for_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever calls programs had all processes of the machine looked at every other second."""
    family = begun(Family(monkeypatch))
    for pid in range(40):
        family.children = [Worker(pid, [1.0])]
        family.looks(1)
    assert family.listed <= 5


def test_two_looks_in_no_time_tell_nothing_of_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """One tick of the clock by which it is timed was many cores, for eight seconds."""
    family = Family(monkeypatch, Worker(1, [40.0, *[0.1] * 20]), every=0.001)
    begun(family).looks(2)
    family.every = 1.0
    assert max(family.looks(10)) == 0


def test_a_worker_that_has_gone_and_that_none_follows_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    family = begun(Family(monkeypatch, Worker(1, [1.0] * 20)))
    family.looks(20)
    family.children = []
    assert family.looks(12)[-3:] == [0, 0, 0]
    assert not family.sensor._children


def test_a_worker_of_which_nothing_could_be_told_once_is_still_one(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(1, [1.0] * 60)
    family = begun(Family(monkeypatch, worker))
    family.looks(20)
    with monkeypatch.context() as patch:
        patch.setattr(worker, "cpu_times", worker._gone)
        family.looks(1)
    assert family.looks(1)[-1] > 0
    assert not family.sensor._children[1].gone


def test_a_stranger_with_the_number_of_a_worker_is_not_that_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    family = begun(Family(monkeypatch, Worker(1, [1.0] * 60)))
    family.looks(20)
    family.children = [Worker(1, [0.0] * 60)]
    assert family.looks(40)[-1] == 0


def test_what_a_child_took_before_it_was_seen_is_not_of_now() -> None:
    """Children are looked for every ten seconds: those of an epoch passed for a load."""
    clock = Ticks()
    sensor = Cores(clock)
    sensor.read()
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as child:
        time.sleep(0.5)
        clock.now += 2 * cores._LIST_EVERY
        spent = [spent for _, spent, *_ in [tuple(sensor._busy()) for _ in range(2)]]
        assert child.pid in sensor._children
        child.kill()
    assert spent[0] < 0.1 and spent[1] - spent[0] < 0.1


def test_who_plans_for_us_is_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as planner:
        monkeypatch.setattr(cores, "planners", lambda: frozenset([planner.pid]))
        sensor = Cores()
        sensor.read()
        assert planner.pid not in sensor._children
        time.sleep(0.3)
        _, tree, aside, _ = sensor._busy()
        planner.kill()
    assert tree == 0
    assert aside > 0.05


RANKS = """
import os, subprocess, sys, time
busy = lambda code, **environ: subprocess.Popen([sys.executable, "-c", code], env={**os.environ, **environ})
others = [busy("while True: pass", LOCAL_RANK="1"), busy("while True: pass")]
from torch_tiers.monitor.sensors.cores import Cores, _ranks_beside
import psutil
class Started:  # by the same launcher as those
    pid = 0
    parent = staticmethod(psutil.Process)
print(list(_ranks_beside(Started)) == [others[0].pid])
sensor = Cores()
sensor._process.parent = psutil.Process
sensor.read()
time.sleep(0.5)
_, _, aside, _ = sensor._busy()
print(aside > 0.05)
for other in others:
    other.kill()
"""


@pytest.mark.parametrize("ranks, told", [("2", ["True", "True"]), ("1", ["False", "False"])])
def test_another_rank_of_the_job_is_no_load(ranks: str, told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """They do what this one does, and passed for somebody who keeps the memory bus busy."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    done = subprocess.run([sys.executable, "-c", RANKS], capture_output=True, text=True, check=True)
    assert done.stdout.split() == told


def test_what_plans_for_us_is_no_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """It came as plans were made for a load, and as it went that had halved."""
    sensor, totals = Cores(Ticks()), iter((0.0, 0.0, 2.0 * k, 10.0 * k) for k in range(9))
    monkeypatch.setattr(sensor, "_busy", lambda: iter(next(totals)))
    found = [values(reading) for reading in (sensor.read() for _ in range(9)) if reading]
    assert (found[-1]["others"], found[-1]["load"]) == (8.0, 8.0)


def test_children_that_ended_do_not_make_the_count_go_back() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as child:
        sensor = Cores()
        time.sleep(0.3)
        sensor.read()
        child.kill()
    time.sleep(0.05)
    assert values(sensor.read())["tree"] >= 0
