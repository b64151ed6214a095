"""What is counted of a session, and of it what is not learning."""

from __future__ import annotations

from torch_tiers.migrator.telemetry.counters import Counters


def test_what_is_settled_is_told_without_what_came_before_the_last_plan() -> None:
    counters = Counters(iterations=3, flushes=200)
    counters.moved["d2h"] = 100
    counters.stalled("d2h", 4.0)
    counters.planned()
    counters.iterations, counters.flushes, counters.moved["d2h"] = 5, 203, 110
    counters.stalled("h2d", 0.5)
    assert counters.settled() == {
        "iterations": 2,
        "flushes": 3,
        "moved": {"d2h": 10, "h2d": 0, "disk_write": 0, "disk_read": 0, "gds_write": 0, "gds_read": 0},
        "stalled_s": {"d2h": 0.0, "h2d": 0.5},
    }
    assert counters.stalls["d2h"].seconds == 4.0


def test_a_wait_that_is_told_late_is_that_of_its_iteration() -> None:
    """A device is through with the last iterations of learning, which wait longest, after there is a plan."""
    counters = Counters(iterations=3)
    counters.planned()
    counters.stalled("d2h", 4.0, iteration=3)
    counters.stalled("d2h", 0.25, times=2, iteration=4)
    assert counters.settled()["stalled_s"] == {"d2h": 0.5}
    assert counters.stalls["d2h"].seconds == 4.5
