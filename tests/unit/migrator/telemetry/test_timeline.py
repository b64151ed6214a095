"""What is recorded of a run, and what of it is written."""

from __future__ import annotations

import json
import os
import threading
import time
from typing import Any

import pytest

from torch_tiers.migrator.telemetry.counters import Counters
from torch_tiers.migrator.telemetry.timeline import Timeline
from torch_tiers.migrator.telemetry.trace_events import HOST
from torch_tiers.migrator.telemetry.transfers import Transfer


def told(timeline: Timeline) -> list[dict[str, Any]]:
    """All but the names of tracks."""
    return [event for event in json.loads(timeline.to_json())["traceEvents"] if event["ph"] != "M"]


def tracks(timeline: Timeline) -> list[str]:
    events = json.loads(timeline.to_json())["traceEvents"]
    return [event["args"]["name"] for event in events if event["name"] == "thread_name"]


# ------------------------------------------------------------------------------------------- format


def test_a_timeline_of_nothing_is_a_file_all_the_same() -> None:
    whole = json.loads(Timeline().to_json())
    assert whole["displayTimeUnit"] == "ms"
    assert {event["name"] for event in whole["traceEvents"]} == {"process_name", "process_sort_index", "process_labels"}
    assert whole["otherData"]["dropped_events"] == 0


def test_zero_on_the_clock_is_told_in_unix_time() -> None:
    timeline = Timeline()
    timeline.happened("now")
    whole = json.loads(timeline.to_json())
    (event,) = told(timeline)
    assert event["ts"] / 1e6 + whole["otherData"]["unix_time_at_zero"] == pytest.approx(time.time(), abs=5)


def test_the_host_comes_first_and_its_tracks_are_whole() -> None:
    timeline = Timeline()
    for device in ("cuda:1", "cuda:0"):
        timeline.copied(device, "d2h", 1, 0.0, 1.0)
        timeline.waited(device, "h2d", 0.0, 1.0)
        timeline.iteration(device, 1, 0.0)
        timeline.iteration(device, 2, 1.0)
    timeline.copied(HOST, "disk_read", 1, 0.0, 1.0)
    timeline.happened("learns anew")
    assert tracks(timeline) == [
        "host events",
        "host disk_read",
        "cuda:0 iterations",
        "cuda:0 waits (sampled)",
        "cuda:0 d2h (sampled)",
        "cuda:1 iterations",
        "cuda:1 waits (sampled)",
        "cuda:1 d2h (sampled)",
    ]


def test_what_overlaps_goes_on_tracks_of_its_own() -> None:
    timeline = Timeline()
    for begin, end in ((0.0, 2.0), (1.0, 3.0), (2.0, 4.0)):
        timeline.copied(HOST, "disk_write", 1, begin, end)
    assert tracks(timeline) == ["host disk_write", "host disk_write, 2"]
    assert [event["tid"] for event in told(timeline)] == [1, 2, 1]


# ---------------------------------------------------------------------------------------- recording


def test_copies_are_placed_by_what_their_times_count_from_and_tell_their_speed() -> None:
    timeline = Timeline()
    timeline.copies("cuda:0", [Transfer("d2h", 8 * 10**6, 0.001, 0.002), Transfer("h2d", 1, 0.5, 0.5)], since=40.0)
    (copy,) = told(timeline)  # what took no time cannot be believed
    assert (copy["name"], copy["ts"], copy["dur"]) == ("d2h", 40_001_000.0, 1_000.0)
    assert copy["args"] == {"bytes": 8 * 10**6, "GB/s": 8.0}


def test_a_step_lasts_from_the_end_of_the_one_before_it() -> None:
    timeline = Timeline()
    for number, end in enumerate((1.0, 1.5, 3.5), 1):
        timeline.step(number, end)
    assert [(event["name"], event["ts"], event["dur"]) for event in told(timeline)] == [
        ("step 2", 1e6, 5e5),
        ("step 3", 1.5e6, 2e6),
    ]


def test_iterations_that_nobody_saw_are_one_slice_with_the_next() -> None:
    timeline = Timeline()
    for number, end in ((1, 1.0), (2, 2.0), (9, 9.0)):
        timeline.iteration("cpu", number, end)
    assert [event["name"] for event in told(timeline)] == ["iteration 2", "iterations 3 to 9"]


def test_an_iteration_that_ended_before_the_last_one_did_is_not_told() -> None:
    """Two threads, each with a stream of its own: one of these was ahead."""
    timeline = Timeline()
    for number, end in ((1, 1.0), (2, 3.0), (3, 2.5), (4, 4.0)):
        timeline.iteration("cuda:0", number, end)
    assert [(event["name"], event["ts"]) for event in told(timeline)] == [
        ("iteration 2", 1e6),
        ("iterations 3 to 4", 3e6),
    ]


def test_the_latest_events_are_kept_and_the_others_counted() -> None:
    timeline = Timeline(most=10)
    for number in range(25):
        timeline.happened(str(number))
    whole = json.loads(timeline.to_json())
    assert [event["name"] for event in told(timeline)] == [str(number) for number in range(15, 25)]
    assert whole["otherData"]["dropped_events"] == 15


def test_what_groups_do_pushes_nothing_else_out_and_is_counted_by_itself() -> None:
    timeline = Timeline(most=10, of_groups=4)
    timeline.step(1, 1.0)
    timeline.step(2, 2.0)
    for number in range(6):
        timeline.counted_at_group("dram", float(number), ("in use", number))
    assert [event["name"] for event in told(timeline)] == ["step 2", *["dram"] * 4]
    more = json.loads(timeline.to_json())["otherData"]
    assert (more["dropped_events"], more["dropped_events_of_groups"]) == (0, 2)


def test_a_rank_is_a_process_of_its_own_by_its_name() -> None:
    """Process ids may be the same on two nodes, and 0 is Perfetto's idle process."""
    first, second = (json.loads(Timeline(rank=rank).to_json())["traceEvents"] for rank in (0, 1))
    assert [event["args"] for event in second[:2]] == [{"name": "rank 1"}, {"sort_index": 1}]
    assert {event["pid"] for event in first} == {1}
    assert {event["pid"] for event in second} == {2}
    nobody_knows = json.loads(Timeline(rank=None).to_json())["traceEvents"]
    assert nobody_knows[0]["args"] == {"name": f"process {os.getpid()}"}
    assert nobody_knows[0]["pid"] == os.getpid()


def test_threads_may_record_while_another_writes() -> None:
    timeline, each = Timeline(most=1000), 4000

    def record() -> None:
        for _ in range(each):
            timeline.happened("something")

    threads = [threading.Thread(target=record) for _ in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert len(told(timeline)) <= 1000
    assert json.loads(timeline.to_json())["otherData"]["dropped_events"] == 3 * each - 1000


def test_a_wait_of_the_host_is_counted_and_told_with_the_same_duration() -> None:
    counters = Counters(timeline=Timeline())
    with counters.waiting("disk_read"):
        time.sleep(0.01)
    assert counters.timeline is not None
    (wait,) = told(counters.timeline)
    assert (wait["cat"], wait["name"]) == ("waits", "disk_read")
    assert wait["dur"] / 1e6 == pytest.approx(counters.stalls["disk_read"].seconds, abs=1e-6)
