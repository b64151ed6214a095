"""Events of a device on the host's clock; the device here is played."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from random import Random
from typing import Any, cast

import pytest
import torch

from tests.unit.migrator.streams.marks import Mark
from torch_tiers.allocator.native.copy.lane import Library
from torch_tiers.migrator.streams import Memory
from torch_tiers.migrator.streams.clock import DeviceClock
from torch_tiers.migrator.streams.cuda import CudaCompute
from torch_tiers.migrator.telemetry.counters import Counters
from torch_tiers.migrator.telemetry.timeline import Timeline

# ------------------------------------------------------------------------------------------- a clock


class Machine:
    """A host, and a device whose clock has another zero, and gains so many seconds in each."""

    def __init__(self, gains: float = 0.0) -> None:
        self.now = 500.0
        self.gains = gains
        self.clock = DeviceClock(lambda: self.now)

    def off(self, late: float, seen: float | None = None) -> float:
        """How far off an event is placed that is passed `late` seconds after it was recorded, and seen so `seen`."""
        recorded = self.now
        event = Passed(recorded + late, self.gains)
        self.now += late if seen is None else seen
        return self.clock.place(event, recorded) - event.at


class Passed:
    """An event, by the host's clock and by that of the device."""

    def __init__(self, at: float, gains: float) -> None:
        self.at = at
        self._told = (1 + gains) * at + 7000.0

    def elapsed_time(self, end: Any) -> float:
        return 1e3 * (end._told - self._told)


def test_an_event_of_an_idle_device_ties_the_clocks_together_for_all_that_follow() -> None:
    machine = Machine()
    assert machine.off(late=0.3) == pytest.approx(-0.3)  # nobody knows better
    assert machine.off(late=0.2) == pytest.approx(-0.2)  # as far as was seen
    assert machine.off(late=0.0) == pytest.approx(0)
    assert machine.off(late=0.3, seen=0.9) == pytest.approx(0)


def test_an_event_may_lie_before_the_last_one_that_was_placed() -> None:
    machine = Machine()
    earlier = Passed(machine.now, 0.0)
    machine.now += 1
    assert machine.off(late=0.0) == pytest.approx(0)
    assert machine.clock.place(earlier, 500.0) == pytest.approx(500.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("gains", [-1e-4, 1e-4])
def test_clocks_that_drift_apart_are_tied_together_again_and_again(gains: float, seed: int) -> None:
    rng, machine = Random(seed), Machine(gains)
    machine.off(late=0.0)
    for _ in range(2000):
        late = rng.choice((0.0, 0.1))
        off = machine.off(late, seen=late + 0.05)
        # A host that is never waited for learns that the device's clock is fast only by what it sees.
        assert -1e-3 < off <= 0.05 + 1e-9


# ------------------------------------------------------------------------- what a GPU's compute stream tells


class Peaks:
    """Of an allocator whose use the test tells."""

    def __init__(self) -> None:
        self.highest = self.flushes = 0

    def use(self, nbytes: int) -> None:
        self.highest = max(self.highest, nbytes)

    def take_peak(self, *, with_present: bool = False) -> int:
        return self.highest

    def restart(self) -> tuple[int, int]:
        highest, self.highest = self.highest, 0
        return highest, self.flushes

    def retries(self) -> int:
        return self.flushes

    def delayed(self) -> float:
        return 0.0


@pytest.fixture
def peaks() -> Peaks:
    return Peaks()


@pytest.fixture
def compute(monkeypatch: pytest.MonkeyPatch, peaks: Peaks) -> CudaCompute:
    """That of a GPU, which passes every event at once, and waits 10 ms for every lane."""
    monkeypatch.setattr(torch._C, "_cuda_getCurrentStream", lambda index: (0, 0, 0), raising=False)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False, raising=False)
    monkeypatch.setattr(CudaCompute, "mark", lambda self, stream: Mark())
    monkeypatch.setattr(CudaCompute, "follow", lambda self, stream, event: (Mark(), Mark(late=0.01)))
    monkeypatch.setattr(CudaCompute, "hold", lambda self, stream, event: None)
    return CudaCompute(torch.device("cuda", 0), Counters(timeline=Timeline()), cast("Library", None), Memory(peaks))


def iteration(compute: CudaCompute, *causes: str) -> None:
    for cause in causes:
        compute.wait(Mark(), cause, compute.stream())
    time.sleep(0.011)
    compute._counters.iterations += 1
    compute.settle()


def slices(compute: CudaCompute, kind: str) -> list[dict[str, Any]]:
    timeline = compute._counters.timeline
    assert timeline is not None
    events = json.loads(timeline.to_json())["traceEvents"]
    return [event for event in events if event["ph"] == "X" and event["cat"] == kind]


def test_flushes_of_the_allocator_s_cache_are_counted(compute: CudaCompute, peaks: Peaks) -> None:
    """Also those since the program had PyTorch count anew."""
    told = []
    for peaks.flushes in (0, 2, 2, 3, 1, 0, 1):
        told.append(compute.pressed())
    assert told == [False, True, False, True, True, False, True]
    assert compute._counters.flushes == 5


def test_what_an_evaluation_between_two_iterations_takes_is_no_peak_of_theirs(
    compute: CudaCompute, peaks: Peaks
) -> None:
    """What a second optimizer takes is. Nor is a flush theirs, which is counted all the same."""
    peaks.use(100)
    assert compute.peak(0) == 100
    peaks.use(130)
    compute.pass_by(counts=True)
    peaks.use(500)
    peaks.flushes = 2
    compute.pass_by(counts=False)
    peaks.use(90)
    assert (compute.peak(0), compute.pressed()) == (130, False)
    assert compute._counters.flushes == 2
    peaks.use(90)
    compute.pass_by(counts=False)
    peaks.use(80)
    assert compute.peak(0) == 80


def test_iterations_of_a_device_follow_one_another(compute: CudaCompute) -> None:
    start = time.perf_counter()
    for _ in range(4):
        iteration(compute)
    compute.close()
    iterations = slices(compute, "iterations")
    assert [event["name"] for event in iterations] == ["iteration 2", "iteration 3", "iteration 4"]
    for first, second in pairwise(iterations):
        assert first["ts"] + first["dur"] == pytest.approx(second["ts"], abs=0.01)
    assert start <= iterations[0]["ts"] / 1e6
    assert (iterations[-1]["ts"] + iterations[-1]["dur"]) / 1e6 <= time.perf_counter()


def test_waits_lie_where_they_were_and_are_those_that_are_counted(compute: CudaCompute) -> None:
    before = time.perf_counter()
    iteration(compute, "d2h")
    between = time.perf_counter()
    iteration(compute, "h2d")
    compute.close()
    d2h, h2d = slices(compute, "waits")
    assert before <= d2h["ts"] / 1e6 + 1e-3 and (d2h["ts"] + d2h["dur"]) / 1e6 <= between + 1e-3
    assert between <= h2d["ts"] / 1e6 + 1e-3
    for wait in (d2h, h2d):
        assert wait["dur"] / 1e6 == pytest.approx(compute._counters.stalls[wait["name"]].seconds, abs=1e-6)


def test_of_iterations_whose_waits_are_not_timed_only_the_waits_are_missing(compute: CudaCompute) -> None:
    compute.time_waits(0)
    for _ in range(3):
        iteration(compute, "h2d")
    compute.close()
    assert [event["name"] for event in slices(compute, "iterations")] == ["iteration 2", "iteration 3"]
    assert slices(compute, "waits") == []
