"""The format in which Perfetto reads a timeline."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.trace_event_rules import broken
from torch_tiers.migrator.telemetry.trace_events import HOST, Event, Process, trace_events

RANK = Process(1, "rank 0")


def of(phase: str, events: list[Event], process: Process = RANK) -> list[dict[str, Any]]:
    return [event for event in trace_events(events, process) if event["ph"] == phase]


def group(number: int, kind: str, begin: float, of_group: int) -> Event:
    return (number, "cuda:0", kind, kind, begin, begin + 0.5, (("group", of_group),))


def count(number: int, counter: str, at: float, **series: int) -> Event:
    return (number, HOST, "in use", counter, at, None, tuple(series.items()))


def test_slices_and_instants_are_chrome_s_trace_events() -> None:
    events: list[Event] = [
        (2, "cuda:0", "h2d", "h2d", 3.0, 3.25, (("bytes", 500), ("GB/s", 2e-6))),
        (1, HOST, "events", "plan by auto", 2.5, None, (("device", "cuda:0"),)),
    ]
    assert trace_events(events, Process(77, "rank 76", "pid 5 on here", 76)) == [
        {"ph": "M", "pid": 77, "tid": 0, "name": "process_name", "args": {"name": "rank 76"}},
        {"ph": "M", "pid": 77, "tid": 0, "name": "process_sort_index", "args": {"sort_index": 76}},
        {"ph": "M", "pid": 77, "tid": 0, "name": "process_labels", "args": {"labels": "pid 5 on here"}},
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


@given(st.lists(st.tuples(st.sampled_from(("d2h", "waits")), st.floats(0, 1e6), st.floats(1e-9, 1e5))))
def test_no_two_slices_of_a_track_overlap_and_none_is_lost(slices: list[tuple[str, float, float]]) -> None:
    recorded: list[Event] = [
        (number, "cuda:0", kind, kind, begin, begin + took, ()) for number, (kind, begin, took) in enumerate(slices, 1)
    ]
    events = [event for event in trace_events(recorded, Process(1, "rank 0")) if event["ph"] == "X"]
    assert len(events) == len(slices)
    for track in {event["tid"] for event in events}:
        own = [event for event in events if event["tid"] == track]
        assert len({event["cat"] for event in own}) == 1
        for first, second in pairwise(own):
            assert round(1e3 * (first["ts"] + first["dur"])) <= round(1e3 * second["ts"])


# ------------------------------------------------------------------------------------------- arrows


def test_an_arrow_leads_from_a_group_s_offload_to_its_first_prefetch() -> None:
    events = [group(1, "offloads", 1.0, 7), group(2, "prefetches", 3.0, 7), group(3, "prefetches", 5.0, 7)]
    (begin,), (end,) = of("s", events), of("f", events)
    assert (begin["ts"], begin["tid"]) == (1_250_000.0, 1)
    assert (end["ts"], end["tid"], end["bp"]) == (3_250_000.0, 2, "e")
    assert (begin["id"], begin["cat"], begin["name"]) == (end["id"], end["cat"], end["name"])


def test_a_group_of_which_one_end_alone_is_known_has_no_arrow() -> None:
    events = [group(1, "prefetches", 1.0, 1), group(2, "offloads", 2.0, 2)]
    assert of("s", events) == of("f", events) == []


def test_no_arrow_of_a_rank_is_taken_for_another_rank_s() -> None:
    events = [group(1, "offloads", 1.0, 1), group(2, "prefetches", 3.0, 1)]
    numbers = {of("s", events, Process(rank + 1, f"rank {rank}"))[0]["id"] for rank in range(1000)}
    assert len(numbers) == 1000
    assert max(numbers) < 2**53  # which a browser can count to


# ----------------------------------------------------------------------------------------- counters


def test_a_counter_tells_all_its_series_each_time_and_nothing_twice() -> None:
    events = [
        count(1, "hbm", 2.0, saved=5),
        count(2, "hbm", 1.0, peak=9, budget=10),  # told late, of an iteration that had begun before
        count(3, "hbm", 3.0, saved=5),
        count(4, "dram", 3.0, used=1),
        count(5, "hbm", 4.0, saved=0, peak=8),
    ]
    assert [(event["name"], event["ts"], event["args"]) for event in of("C", events)] == [
        ("hbm", 1e6, {"peak": 9, "budget": 10}),
        ("hbm", 2e6, {"peak": 9, "budget": 10, "saved": 5}),
        ("dram", 3e6, {"used": 1}),
        ("hbm", 4e6, {"peak": 8, "budget": 10, "saved": 0}),
    ]


# -------------------------------------------------------------------------------------------- rules

TIMES = st.floats(0, 1e6)
GROUPS = st.tuples(st.sampled_from(("offloads", "prefetches")), TIMES, st.integers(1, 9))
COUNTS = st.tuples(st.sampled_from(("hbm", "dram")), TIMES, st.sampled_from(("saved", "peak")), st.integers(0, 9))


@given(st.lists(GROUPS), st.lists(COUNTS))
def test_whatever_is_recorded_is_written_by_the_rules(
    groups: list[tuple[str, float, int]], counts: list[tuple[str, float, str, int]]
) -> None:
    recorded = [group(0, kind, begin, number) for kind, begin, number in groups]
    recorded += [count(0, counter, at, **{series: value}) for counter, at, series, value in counts]
    assert broken({"traceEvents": trace_events(recorded, RANK)}) == []


def whole() -> dict[str, Any]:
    """A timeline with an event of each phase, by the rules."""
    events: list[Event] = [
        group(1, "offloads", 1.0, 7),
        group(2, "prefetches", 3.0, 7),
        count(3, "hbm", 2.0, saved=5),
        count(4, "hbm", 3.0, saved=6),
        (5, HOST, "events", "learns anew", 2.5, None, ()),
    ]
    read: dict[str, Any] = json.loads(json.dumps({"traceEvents": trace_events(events, RANK)}))
    return read


@pytest.mark.parametrize(
    ("phase", "change", "said"),
    [
        ("X", {"dur": None}, "dur is no time"),
        ("X", {"ts": -1.0}, "ts is no time"),
        ("X", {"ts": float("nan")}, "ts is no time"),
        ("X", {"pid": 0}, "pid is no number"),
        ("X", {"tid": "one"}, "tid is no number"),
        ("X", {"tid": 9}, "thread 9 of process 1 has no name"),
        ("X", {"pid": 9}, "process 9 has no name"),
        ("X", {"name": ""}, "no name"),
        ("X", {"ph": "B"}, "phase"),
        ("X", {"ts": 1e5}, "outside of any slice"),
        ("i", {"s": "x"}, "scope"),
        ("C", {"args": {"saved": "5"}}, "series are no numbers"),
        ("C", {"args": {"saved": True}}, "series are no numbers"),
        ("C", {"args": {}}, "series are no numbers"),
        ("C", {"args": {"saved": 5, "peak": 1}}, "peak is left out"),
        ("s", {"id": 1}, "does not begin once and end once"),
        ("s", {"ts": 1}, "outside of any slice"),
        ("s", {"id": 2**60}, "no number of a flow"),
        ("f", {"bp": "s"}, "ends at the next slice"),
        ("M", {"args": {"nome": "x"}}, "metadata"),
    ],
)
def test_each_rule_finds_what_is_against_it(phase: str, change: dict[str, Any], said: str) -> None:
    good = whole()
    assert broken(good) == []
    event = next(event for event in good["traceEvents"] if event["ph"] == phase)
    event |= change
    assert any(said in line for line in broken(good)), broken(good)


@pytest.mark.parametrize("phase", ["X", "i", "C", "s", "f", "M"])
def test_each_field_of_a_phase_is_asked_for(phase: str) -> None:
    for field in ("name", "ts", "pid", "args", "dur", "id", "bp", "s"):
        good = whole()
        event = next(event for event in good["traceEvents"] if event["ph"] == phase)
        if event.pop(field, None) is not None and (phase, field) != ("i", "args"):
            assert broken(good) == [f"{field} missing: {event}"]


def test_slices_of_a_thread_nest_and_arrows_do_not_go_back() -> None:
    def slices(*spans: tuple[float, float]) -> dict[str, Any]:
        read = whole()
        first = next(event for event in read["traceEvents"] if event["ph"] == "X")
        read["traceEvents"] += [first | {"ts": 9e6 + begin, "dur": end - begin} for begin, end in spans]
        return read

    assert broken(slices((0, 10), (2, 5), (5, 10), (10, 11))) == []
    (line,) = broken(slices((0, 10), (2, 11)))
    assert "ends after the one around it" in line
    backwards = whole()
    for event in backwards["traceEvents"]:
        event["ph"] = {"s": "f", "f": "s"}.get(event["ph"], event["ph"])
        event |= {"bp": "e"} if event["ph"] == "f" else {}
    assert any("ends before it begins" in line for line in broken(backwards))
