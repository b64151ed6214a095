"""Events that a thread has yet to ask a lane for, on a device whose events are the host's clock."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tests.unit.migrator.streams.marks import Mark
from torch_tiers.migrator.streams.cuda import CudaCompute
from torch_tiers.migrator.streams.iteration_timer import IterationTimer
from torch_tiers.migrator.streams.promised import PromisedEvent
from torch_tiers.migrator.telemetry.counters import Counters

LATE = 0.05  # seconds


@pytest.fixture
def compute() -> Any:
    compute: Any = CudaCompute.__new__(CudaCompute)  # without a device
    compute._counters = Counters()
    compute._timer, compute.waited = IterationTimer("cuda:0", compute._counters), None
    compute.capturing, compute.stream = (lambda: False), (lambda: 1)
    compute.held = []
    compute.mark, compute.hold = (lambda stream: Mark()), (lambda stream, event: compute.held.append(event))
    compute.follow = lambda stream, event: None
    return compute


def promised(event: Mark | None) -> PromisedEvent:
    made = PromisedEvent("gds_read")
    threading.Timer(LATE, made.set, (event,)).start()
    return made


def test_what_the_device_idles_while_the_host_waits_for_a_thread_is_a_stall_of_the_lane(compute: Any) -> None:
    """It counted for the program's own time, and plans took the lane for as fast as it was told to be."""
    compute.settle()
    event = Mark()
    compute.wait(promised(event), "gds_read", 1)
    took = compute.settle()
    assert took is not None and took.stalls["gds_read"] == pytest.approx(took.seconds, rel=0.5)
    assert took.stalls["gds_read"] >= LATE / 2 and compute.held == [event]


def test_it_is_left_out_of_what_a_recorded_iteration_takes(compute: Any) -> None:
    compute.waited = []
    compute.wait(promised(Mark()), "gds_read", 1)
    ((reached, on),) = compute.waited
    assert reached.elapsed_time(on) / 1e3 >= LATE / 2


def test_where_waits_are_not_timed_the_stream_waits_all_the_same(compute: Any) -> None:
    compute.time_waits(0)
    event = Mark()
    compute.wait(promised(event), "gds_read", 1)
    compute.wait(promised(None), "gds_read", 1)  # there was nothing to copy
    assert compute.held == [event]


def test_while_hooks_rest_waits_count_once_each_and_for_no_other_iteration(compute: Any) -> None:
    compute.time_waits(0)  # as it was when they began to rest
    for _ in range(3):
        compute.wait(promised(Mark()), "state", 1)
        compute.end_resting_iteration()
    compute.end_resting_iteration()  # of an iteration without any
    compute.close()
    stall = compute._counters.stalls["state"]
    assert stall.count == 2, "all but those of the first, which nobody had timed"
    assert stall.seconds == pytest.approx(2 * LATE, rel=0.9)
