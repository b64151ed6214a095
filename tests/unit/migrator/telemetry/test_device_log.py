"""What the timeline is told of groups, and of what is in use."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

from tests.unit.rig import Rig, layers, run
from torch_tiers.allocator.sizes import MiB
from torch_tiers.migrator.telemetry.counters import Counters
from torch_tiers.migrator.telemetry.device_log import DeviceLog
from torch_tiers.migrator.telemetry.timeline import Timeline

BUDGET = 100 * MiB


def told(rig: Rig, iterations: int = 2) -> tuple[DeviceLog, list[dict[str, Any]]]:
    """What a run of some layers has told, in the order of time."""
    counters = Counters(timeline=Timeline())
    log = DeviceLog("cpu", counters, BUDGET, beside=3, below=lambda: {"dram": rig.arena.used})
    rig.engine.tell(log)
    for _ in range(iterations):
        run(rig, layers(4))
        counters.iterations += 1
    rig.close()
    assert counters.timeline is not None
    events = json.loads(counters.timeline.to_json())["traceEvents"]
    return log, sorted((event for event in events if event["ph"] != "M"), key=lambda event: event["ts"])


def series(events: list[dict[str, Any]], counter: str, name: str) -> list[int]:
    return [event["args"][name] for event in events if event["name"] == counter and name in event["args"]]


def test_each_group_that_comes_back_has_an_offload_a_prefetch_and_an_arrow_between() -> None:
    _, events = told(Rig(budget=0))
    offloads, prefetches = ([e for e in events if e["name"] == name] for name in ("offload", "prefetch"))
    assert len(offloads) == len(prefetches) > 0
    assert {e["args"]["group"]: e["args"]["iteration"] for e in offloads} == {
        e["args"]["group"]: e["args"]["iteration"] for e in prefetches
    }
    assert {e["args"]["iteration"] for e in offloads} == {1, 2}
    assert sum(e["ph"] == "s" for e in events) == sum(e["ph"] == "f" for e in events) == len(offloads)


def test_saved_bytes_rise_with_a_group_and_fall_as_it_leaves_down_to_none() -> None:
    _, events = told(Rig(budget=0), iterations=1)
    saved = series(events, "cpu hbm", "saved")
    assert max(saved) == 4 * MiB
    assert saved[-1] == 0
    changes = [after - before for before, after in pairwise(saved)]
    assert min(changes) < 0 < max(changes)


def test_the_peak_of_an_iteration_is_told_from_its_beginning_with_the_budget() -> None:
    log, events = told(Rig(budget=0), iterations=1)
    first = next(event for event in events if event["name"] == "cpu hbm")
    assert first["args"] == {"peak": log.peak, "budget": BUDGET}
    assert log.peak > 3  # what is beside the allocator counts


def test_what_groups_take_of_dram_is_told_as_they_leave() -> None:
    _, events = told(Rig(budget=0))
    used = series(events, "dram", "in use")
    assert max(used) >= MiB


def test_without_a_timeline_the_last_peak_is_all_that_is_kept() -> None:
    log = DeviceLog("cpu", Counters(), below=lambda: {}["nobody asks"])
    log.saved(log, 5)
    assert log.offloaded(5, 0.0) == 0
    log.prefetched(0, 5, 0.0)
    log.iteration_over(log, 7, 5)
    assert log.peak == 7
    assert not log._saved
