from __future__ import annotations

from dataclasses import replace

from hypothesis import given

from tests.unit.traces import chain, traces
from torch_tiers.migrator.model.trace import Site, Trace
from torch_tiers.migrator.planner.intervals import Interval, durations, inactive, room


def test_a_storage_lies_idle_from_its_last_save_to_each_use() -> None:
    """Saved at 0 and 2, used at 3 and 5."""
    sites = (Site("a:0", 7, 64, 0, (5,)), Site("b:0", 8, 0, 1, (4,)), Site("c:0", 7, 64, 2, (3,)))
    trace = Trace(sites, 6, times=(0.0, 1.0, 2.0, 5.0, 6.0, 9.0), seconds=10.0)
    first, second = inactive(trace)
    assert first == Interval(7, 64, begin=2, end=3, start=2.0, stop=5.0)
    assert second == Interval(7, 64, begin=3, end=5, start=5.0, stop=9.0)
    assert first.seconds == 3.0


def test_stretches_lie_between_positions() -> None:
    trace = replace(chain([1]), times=(1.0, 3.0), seconds=7.0, others=(5, 6, 7))
    assert durations(trace).tolist() == [1.0, 2.0, 4.0]
    assert room(trace, 10).tolist() == [5, 4, 3]


@given(traces())
def test_there_is_an_interval_for_every_use(trace: Trace) -> None:
    assert len(inactive(trace)) == sum(len(life.uses) for life in trace.lifetimes)
    assert all(interval.begin <= interval.end for interval in inactive(trace))
