from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from unittest.mock import ANY, Mock

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from tests.unit.migrator.streams.marks import Mark
from torch_tiers.migrator.streams.cuda import CLOCK, CudaCompute
from torch_tiers.migrator.streams.gaps import without_gaps
from torch_tiers.migrator.streams.hold import LONGEST
from torch_tiers.migrator.streams.host import HostCompute
from torch_tiers.migrator.streams.meter import CudaMeter, MarkTimes
from torch_tiers.migrator.telemetry.counters import Counters

gaps = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=10)


@given(gaps=gaps, times=st.lists(st.integers(0, 60), max_size=20))
@example(gaps=[(10, 20), (50, 60)], times=[0, 10, 15, 30, 70])  # a clock stands still in gaps
@example(gaps=[(20, 40), (10, 30), (25, 27)], times=[10, 50])  # those that overlap count once
@example(gaps=[(30, 20)], times=[10, 50])  # a wait that was none changes nothing
def test_time_left_out_is_that_covered_by_gaps(gaps: list[tuple[float, float]], times: list[float]) -> None:
    covered = {second for start, end in gaps for second in range(int(start), int(end))}
    assert without_gaps(gaps, times) == [at - sum(second < at for second in covered) for at in times]


def test_what_is_done_aside_and_waits_for_lanes_take_no_time() -> None:
    counters = Counters()
    compute = HostCompute(counters)
    meter = compute.meter()
    meter.tick(0)
    with meter.untracked():
        time.sleep(0.05)
    with counters.waiting("d2h"):
        time.sleep(0.05)
    meter.tick(0)
    time.sleep(0.02)
    compute.static = 7
    measures = meter.finish(0, [0, 0, 0])
    assert measures.times[1] - measures.times[0] < 0.02
    assert measures.seconds == pytest.approx(0.02, abs=0.015)
    assert measures.others == (0, 0, 7)


def test_on_a_cpu_the_program_s_clock_stands_still_from_the_begin_of_a_hook_to_its_end() -> None:
    meter = HostCompute(Counters()).meter()
    begun = time.perf_counter()
    meter.arrive()  # a hook for a tensor that is saved
    time.sleep(0.05)
    meter.tick(0)
    time.sleep(0.05)
    meter.resume()
    meter.arrive(outside=True)  # one around a module
    time.sleep(0.05)
    meter.depart()
    measures = meter.finish(0, [0, 0])
    assert measures.seconds <= time.perf_counter() - begun - 0.15
    assert measures.times[0] <= measures.seconds


class FakeCompute:
    """A device that is always through with everything, and whose memory a test sets."""

    waited: object = None

    def __init__(self, mark_times: MarkTimes = MarkTimes()) -> None:  # noqa: B008
        self.mark_times = mark_times
        self.highest = 0  # bytes since the last look
        self.present = 0  # bytes
        self.with_present = True
        self.stream_has: list[str] = []
        self.has_passed_all = False

    @contextmanager
    def untracked(self) -> Iterator[None]:
        self.stream_has.append("untracked")
        yield
        self.stream_has.append("no more")

    def take_peak(self, *, with_present: bool = False) -> int:
        self.with_present = with_present
        peak, self.highest = self.highest, 0
        return max(peak, self.present)

    def delayed(self) -> float:
        return 0.0

    class Point:
        def __init__(self, compute: FakeCompute) -> None:
            self._compute = compute

        def query(self) -> bool:
            return self._compute.has_passed_all

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, other: object) -> float:
            return 1.0

    def mark(self, stream: object) -> Point:
        self.stream_has.append("mark")
        return self.Point(self)

    def hold_up(self, seconds: float) -> None:
        self.stream_has.append(f"hold up {seconds} s")

    def stream(self) -> tuple[int, int, int]:
        return 7, 0, 1

    def capturing(self) -> bool:
        return False


After = Callable[[int], CudaMeter]


@pytest.fixture
def after() -> After:
    """The meter of an iteration, once memory has come to so many bytes since the last look."""
    meter = CudaMeter(compute := FakeCompute())  # type: ignore[arg-type]

    def after(highest: int) -> CudaMeter:
        compute.highest = highest
        return meter

    return after


def test_what_our_own_work_does_to_memory_is_no_stretch_s(after: After) -> None:
    after(100).tick(30)
    after(500).resume()  # the hook releases one group, and brings another
    assert after(80).finish(0, [0, 0]).others == (70, 80)


def test_what_is_released_in_a_stretch_is_nobody_else_s_until_then(after: After) -> None:
    """As a group leaves at a save: memory that the peak of the stretch begins with, and nobody could use before."""
    after(100).tick(60)
    after(100).part(60)
    assert after(70).finish(20, [0, 0]).others == (40, 50)


def test_what_left_in_a_stretch_and_is_held_by_the_program_counts_off_once(after: After) -> None:
    """Before it left it was resident there: taken off again, a plan let in as much too much."""
    after(30).tick(10)
    after(30).part(10)
    after(30).tick(2)  # the eight bytes that left are still there
    assert after(0).finish(2, [0, 8, 8]).others == (20, 20, 0)


def test_our_own_work_at_a_position_is_no_part_of_the_stretch_after_it(after: After) -> None:
    after(0).tick(0)
    after(300).part(0)
    after(0).resume()
    assert after(10).finish(0, [0, 0]).others == (0, 10)


def test_what_is_in_use_now_counts_among_the_most_so_far_and_no_peak_is_lost_by_the_question() -> None:
    """As what a program makes between its backward and the optimizer's step."""
    meter = CudaMeter(compute := FakeCompute())  # type: ignore[arg-type]
    assert meter.others_so_far(0) == 0, "no position was reached"
    compute.highest = 100
    meter.tick(30)
    compute.highest, compute.present = 150, 120
    assert meter.others_so_far(20) == 100
    compute.present = 10
    assert meter.others_so_far(0) == 70
    assert meter.finish(0, [0, 0]).others == (70, 150)


def test_what_the_stretch_took_before_something_was_released_counts_too(after: After) -> None:
    after(300).part(60)
    after(70).tick(20)
    assert after(0).finish(0, [0, 0]).others == (240, 0)


@pytest.mark.parametrize("brought", [True, False])
def test_what_lies_there_as_a_stretch_begins_counts_where_something_may_come_beside_it(*, brought: bool) -> None:
    """At a save it counted for the stretch before. What the loss's function holds until it returns counted twice."""
    meter = CudaMeter(compute := FakeCompute())  # type: ignore[arg-type]
    meter.tick(0)
    assert compute.with_present
    meter.resume(brought=brought)
    assert compute.with_present is brought


def test_the_allocator_is_told_what_is_not_the_program_s() -> None:
    meter = CudaMeter(compute := FakeCompute())  # type: ignore[arg-type]
    with meter.untracked():
        compute.stream_has.append("work")
    assert compute.stream_has == ["mark", "mark", "untracked", "work", "no more", "mark"]


def test_what_the_program_holds_of_its_saved_tensors_is_theirs(after: After) -> None:
    after(100).tick(0)
    assert after(100).finish(0, [0, 60]).others == (100, 40)


def test_the_device_is_held_back_before_the_iteration_begins() -> None:
    compute = FakeCompute()
    CudaMeter(compute, held=True)  # type: ignore[arg-type]
    assert compute.stream_has == ["mark", f"hold up {LONGEST} s", "mark", "mark"]
    compute = FakeCompute()
    CudaMeter(compute)  # type: ignore[arg-type]
    assert compute.stream_has == ["mark"]


def test_what_the_device_is_held_back_is_left_out() -> None:
    meter = CudaMeter(compute := FakeCompute(), held=True)  # type: ignore[arg-type]
    meter.tick(0)
    assert compute.stream_has.count("mark") == 4, "it is far behind"
    compute.has_passed_all = True
    meter.tick(0)
    assert compute.waited == [ANY], "from where to where of the stream"
    assert len(meter.finish(0, [0, 0, 0]).times) == 2


def test_a_device_that_is_not_to_be_held_back_is_not_however_near_it_comes() -> None:
    meter = CudaMeter(compute := FakeCompute())  # type: ignore[arg-type]
    compute.has_passed_all = True
    meter.tick(0)
    assert compute.stream_has == ["mark", "mark"]


class IdleDevice(FakeCompute):
    """A device that has nothing to do whenever the host is late: it passes events as they are marked."""

    def mark(self, stream: object) -> Mark:  # type: ignore[override]
        return Mark()


def test_a_device_that_waits_for_our_own_work_is_not_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a position, before one (as where a forward begins), and as the iteration begins."""
    clock = Mock(return_value=0.0)
    monkeypatch.setattr(time, "perf_counter", clock)
    meter = CudaMeter(IdleDevice())  # type: ignore[arg-type]
    clock.return_value += 10.0
    meter.depart()
    clock.return_value += 1.0  # the program's, like every second that is told of below
    meter.arrive(outside=True)
    clock.return_value += 10.0
    meter.depart()
    clock.return_value += 2.0
    meter.arrive()
    meter.tick(0)
    clock.return_value += 10.0
    meter.resume()
    clock.return_value += 4.0
    meter.arrive(outside=True)
    clock.return_value += 10.0
    meter.tick(0)
    meter.resume()
    clock.return_value += 8.0
    measures = meter.finish(0, [0, 0, 0])
    assert measures.clocks is not None
    assert measures.clocks.device == pytest.approx([3.0, 4.0, 8.0])
    assert measures.clocks.host == pytest.approx([3.0, 4.0, 8.0])


def test_what_our_own_events_take_the_device_is_not_the_program_s() -> None:
    """A stretch ends with one; where a module begins or ends there is one more."""
    meter = CudaMeter(FakeCompute(MarkTimes(1e-4)))  # type: ignore[arg-type]
    meter.tick(0)
    meter.arrive(outside=True)
    meter.depart()
    meter.tick(0)
    measures = meter.finish(0, [0, 0, 0])
    assert measures.clocks is not None
    assert measures.clocks.device == pytest.approx([9e-4, 0.0, 0.0]), "events are a millisecond apart"
    meter = CudaMeter(FakeCompute(MarkTimes(1e-4)))  # type: ignore[arg-type]
    meter.arrive(outside=True)
    meter.depart()
    assert meter.finish(0, [0]).seconds == pytest.approx(8e-4), "the one of the module, and the last"


def test_where_nothing_but_events_is_in_between_the_device_did_nothing() -> None:
    """A stream passes no second event for some time, which is longer than what one takes behind a kernel."""
    assert [MarkTimes(3e-6, 11e-6).without(busy, 1) for busy in (11e-6, 12e-6)] == [0.0, pytest.approx(9e-6)]
    assert MarkTimes(3e-6, 11e-6).without(20e-6, 2) == 0.0


class FakeOperators:
    """A clock of operators, which has timed as much as a test says; it is its own times."""

    def __init__(self, seconds: list[float]) -> None:
        self.seconds = seconds
        self.on: list[tuple[int, ...]] = []
        self.ends = self.drops = 0

    def begin(self, device: int, stream: int) -> FakeOperators:
        self.on.append((device, stream))
        return self

    def tick(self, stream: int) -> None:
        self.on.append((stream,))

    def end(self) -> list[float]:
        self.ends += 1
        return self.seconds

    def drop(self) -> None:
        self.drops += 1


def test_what_the_device_does_between_operators_is_not_the_program_s() -> None:
    """It waits there: for a late host, or for other ranks."""
    operators = FakeOperators([0.001, 0.0, 0.5])  # an event is a second after another here, whichever these are
    meter = CudaMeter(FakeCompute(), operators=operators)  # type: ignore[arg-type]
    meter.tick(0)
    meter.tick(0)
    measures = meter.finish(0, [0, 0, 0])
    assert measures.clocks is not None
    wall = [1e-3, 0.0, 0.0]
    assert list(measures.clocks.device) == [min(each) for each in zip(wall, operators.seconds, strict=True)]
    assert (*measures.times, measures.seconds) == (1e-3, 1e-3, 1e-3)
    assert (operators.on, operators.ends) == ([(0, 7), (7,), (7,)], 1)


def test_where_no_operator_came_by_the_device_s_own_time_is_told() -> None:
    meter = CudaMeter(FakeCompute(), operators=FakeOperators([0.0, 0.0]))  # type: ignore[arg-type]
    meter.tick(0)
    assert meter.finish(0, [0, 0]).seconds == 1e-3


def test_operators_are_timed_no_longer_than_somebody_wants_to_know() -> None:
    operators = FakeOperators([])
    meter = CudaMeter(FakeCompute(), operators=operators)  # type: ignore[arg-type]
    meter.tick(0)
    meter.abandon()
    meter.tick(0)
    assert (len(operators.on), operators.ends, operators.drops) == (2, 0, 1)


def test_without_a_gpu_there_is_nobody_to_hold_back() -> None:
    begin = time.perf_counter()
    HostCompute(Counters()).meter(held=True).finish(0, [0])
    assert time.perf_counter() - begin < 5


@pytest.mark.parametrize(("told", "rate"), [({"clock_rate": 2_000_000}, 2e9), ({}, CLOCK)], ids=["told", "not told"])
def test_the_device_is_held_up_by_cycles_of_its_clock(
    told: dict[str, int], rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[int] = []
    entered: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "_sleep", slept.append)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext(entered.append(device)))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**told))
    compute = CudaCompute.__new__(CudaCompute)
    compute.device = torch.device("cuda", 1)
    compute.capturing = lambda: False
    compute.hold_up(0.1)
    assert (slept, entered) == ([int(0.1 * rate)], [compute.device])
    compute.capturing = lambda: True
    compute.hold_up(0.1)
    assert len(slept) == 1, "what is captured would wait in every replay"
