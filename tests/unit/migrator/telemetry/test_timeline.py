"""What is recorded of a run, and the format in which Perfetto reads it."""

from __future__ import annotations

import json
import threading
import time
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_tiers.migrator.telemetry.counters import Counters
from torch_tiers.migrator.telemetry.timeline import HOST, Event, Timeline, trace_events
from torch_tiers.migrator.telemetry.transfers import Transfer


def told(timeline: Timeline) -> list[dict[str, Any]]:
    """All but the names of tracks."""
    return [event for event in json.loads(timeline.to_json())["traceEvents"] if event["ph"] != "M"]


def tracks(timeline: Timeline) -> list[str]:
    events = json.loads(timeline.to_json())["traceEvents"]
    return [event["args"]["name"] for event in events if event["name"] == "thread_name"]


# ------------------------------------------------------------------------------------------- format


def test_slices_and_instants_are_chrome_s_trace_events() -> None:
    events: list[Event] = [
        (2, "cuda:0", "h2d", "h2d", 3.0, 3.25, (("bytes", 500), ("GB/s", 2e-6))),
        (1, HOST, "events", "plan by auto", 2.5, None, (("device", "cuda:0"),)),
    ]
    assert trace_events(events, process=77) == [
        {"ph": "M", "pid": 77, "tid": 0, "name": "process_name", "args": {"name": "tiers"}},
        {"ph": "M", "pid": 77, "tid": 1, "name": "thread_name", "args": {"name": "host events"}},
        {"ph": "M", "pid": 77, "tid": 1, "name": "thread_sort_index", "args": {"sort_index": 1}},
        {"ph": "M", "pid": 77, "tid": 2, "name": "thread_name", "args": {"name": "cuda:0 h2d (sampled)"}},
        {"ph": "M", "pid": 77, "tid": 2, "name": "thread_sort_index", "args": {"sort_index": 2}},
        {
            "ph": "i",
            "s": "t",
            "name": "plan by auto",
            "cat": "events",
            "ts": 2_500_000.0,
            "pid": 77,
            "tid": 1,
            "args": {"device": "cuda:0"},
        },
        {
            "ph": "X",
            "name": "h2d",
            "cat": "h2d",
            "ts": 3_000_000.0,
            "dur": 250_000.0,
            "pid": 77,
            "tid": 2,
            "args": {"bytes": 500, "GB/s": 2e-6},
        },
    ]


def test_a_timeline_of_nothing_is_a_file_all_the_same() -> None:
    whole = json.loads(Timeline().to_json())
    assert whole["displayTimeUnit"] == "ms"
    assert [event["name"] for event in whole["traceEvents"]] == ["process_name"]
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


@given(st.lists(st.tuples(st.sampled_from(("d2h", "waits")), st.floats(0, 1e6), st.floats(1e-9, 1e5))))
def test_no_two_slices_of_a_track_overlap_and_none_is_lost(slices: list[tuple[str, float, float]]) -> None:
    recorded: list[Event] = [
        (number, "cuda:0", kind, kind, begin, begin + took, ()) for number, (kind, begin, took) in enumerate(slices, 1)
    ]
    events = [event for event in trace_events(recorded, 1) if event["ph"] == "X"]
    assert len(events) == len(slices)
    for track in {event["tid"] for event in events}:
        own = [event for event in events if event["tid"] == track]
        assert len({event["cat"] for event in own}) == 1
        for first, second in pairwise(own):
            assert round(1e3 * (first["ts"] + first["dur"])) <= round(1e3 * second["ts"])


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
