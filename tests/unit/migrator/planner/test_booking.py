from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.traces import chain, traces
from torch_tiers.migrator.model.links import Links
from torch_tiers.migrator.model.trace import Trace
from torch_tiers.migrator.planner.booking import Lane, Lanes, Memory

LINKS = Links(d2h=10.0, h2d=10.0, both=15.0, disk_write=2.0, disk_read=4.0, latency=0.0)
TIMES = st.floats(0, 100).map(lambda t: round(t, 3))


def booked(*spans: tuple[float, float]) -> Lane:
    lane = Lane()
    for start, end in spans:
        lane.book(start, end)
    return lane


@pytest.mark.parametrize(("after", "start"), [(0, 0), (0.5, 4), (2, 4), (4, 4), (5, 8), (9, 9)])
def test_the_earliest_fit_is_the_first_gap_that_is_long_enough(after: float, start: float) -> None:
    assert booked((2, 4), (6, 8)).earliest(after, 2) == start


@pytest.mark.parametrize(("before", "start"), [(10, 8), (9, 4), (6, 4), (5, 0), (2, 0), (1, -1)])
def test_the_latest_fit_is_the_last_gap_that_is_long_enough(before: float, start: float) -> None:
    assert booked((2, 4), (6, 8)).latest(before, 2) == start


def test_bookings_that_touch_become_one() -> None:
    assert booked((0, 1), (2, 3), (1, 2)).booked == ((0, 3),)


def test_a_lane_tells_how_busy_it_is() -> None:
    assert booked((2, 4), (6, 8)).busy(3, 7) == 2


def test_what_goes_to_the_disk_goes_through_dram_first() -> None:
    out, back = Lanes(LINKS).out(20, 1.0, "nvme"), Lanes(LINKS).back(20, 30.0, "nvme")
    assert out.legs == (("d2h", 1.0, 3.0), ("disk_write", 3.0, 13.0))
    assert (out.left, out.end) == (3.0, 13.0)
    assert back.legs == (("disk_read", 23.0, 28.0), ("h2d", 28.0, 30.0))


def test_what_goes_to_the_drive_directly_takes_no_lane_of_dram() -> None:
    lanes = Lanes(replace(LINKS, gds_write=2.0, gds_read=4.0))
    out, back = lanes.out(20, 1.0, "nvme"), lanes.back(20, 30.0, "nvme")
    assert out.legs == (("gds_write", 1.0, 11.0),)
    assert out.left == 11.0, "hbm is free when the drive has it all"
    assert back.legs == (("gds_read", 25.0, 30.0),)
    lanes.book(out)
    assert lanes.out(20, 1.0).start == 1.0
    assert lanes.out(20, 1.0, "nvme").start == 11.0


def test_both_directions_at_once_are_slower() -> None:
    """Each gets 15 of the 20 that the two have alone: a second in company does the work of 0.75."""
    lanes = Lanes(LINKS)
    lanes.book(lanes.out(100, 0.0))
    assert lanes.seconds("h2d", 10, 20.0) == 1.0
    assert lanes.seconds("h2d", 30, 0.0) == pytest.approx(4.0, rel=0.02)
    assert lanes.seconds("h2d", 20, 9.0) == pytest.approx(2.25)


def test_a_lane_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="no lane disk_write"):
        Lanes(Links(d2h=1, h2d=1, both=2)).out(1, 0.0, "nvme")


@given(st.lists(st.tuples(st.booleans(), st.sampled_from(["dram", "nvme"]), st.integers(1, 500), TIMES), max_size=30))
def test_lanes_are_never_overbooked(asked: list[tuple[bool, str, int, float]]) -> None:
    lanes = Lanes(LINKS)
    for out, tier, nbytes, time in asked:
        transfer = lanes.out(nbytes, time, tier) if out else lanes.back(nbytes, time, tier)
        if out:
            assert transfer.start >= time
        else:
            assert transfer.end <= time + 1e-9
        for (_, _, end), (_, start, _) in zip(transfer.legs, transfer.legs[1:], strict=False):
            assert end <= start + 1e-9
        lanes.book(transfer)
    for lane in lanes.lanes.values():
        for (_, end), (start, _) in zip(lane.booked, lane.booked[1:], strict=False):
            assert end <= start + 1e-9


@given(traces())
def test_memory_peaks_at_what_is_alive_at_once(trace: Trace) -> None:
    alive = (
        sum(life.nbytes for life in trace.lifetimes if life.birth <= at <= life.death) for at in range(trace.positions)
    )
    assert Memory(trace, 0).used.max() >= max(alive, default=0)
    assert Memory(trace, 2 * trace.saved_bytes).fits


def test_memory_by_hand() -> None:
    """Two storages, saved at 0 and 1, used at 2 and 3: each is there for the stretch after its use, too."""
    memory = Memory(chain([10, 20]), budget=25)
    assert memory.used.tolist() == [0, 10, 30, 30, 10]
    assert memory.over.tolist() == [0, 0, 5, 5, 0]
    memory.add(2, 3, -10)
    assert memory.over.tolist() == [0, 0, 0, 5, 0]
