from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tests.unit.by_hand import eventually
from torch_tiers.allocator.sizes import KiB, MiB
from torch_tiers.migrator.streams import TIMED
from torch_tiers.migrator.streams.host import HostCompute, HostEvent, HostLane
from torch_tiers.migrator.streams.pieces import whole
from torch_tiers.migrator.telemetry.counters import Counters
from torch_tiers.migrator.telemetry.transfers import Transfer


@pytest.fixture
def counters() -> Counters:
    return Counters()


@pytest.fixture
def lane(counters: Counters) -> Iterator[HostLane]:
    lane = HostLane("d2h", counters)
    yield lane
    lane.close()


def flat(nbytes: int, value: int = 0) -> torch.Tensor:
    return torch.full((nbytes,), value, dtype=torch.uint8)


# ------------------------------------------------------------------------------------- a lane of the host


def test_a_lane_copies_every_piece_and_counts_the_bytes(lane: HostLane, counters: Counters) -> None:
    targets = [flat(5), flat(6)]
    lane.copy([whole(targets[0], flat(5, 3)), whole(targets[1], flat(6, 7))], ()).synchronize()
    assert [target.tolist() for target in targets] == [[3] * 5, [7] * 6]
    assert counters.moved == {"d2h": 11, "h2d": 0, "disk_write": 0, "disk_read": 0, "gds_write": 0, "gds_read": 0}


def test_a_copy_waits_for_what_it_is_to_follow(lane: HostLane) -> None:
    before, target = HostEvent(), flat(1)
    done = lane.copy([whole(target, flat(1, 9))], (before,))
    time.sleep(0.02)
    assert (done.query(), target.item()) == (False, 0)
    before.set()
    done.synchronize()
    assert target.item() == 9


def test_copies_keep_their_order(lane: HostLane) -> None:
    before, target = HostEvent(), flat(1)
    first, second = lane.copy([whole(target, flat(1, 1))], (before,)), lane.copy([whole(target, flat(1, 2))], ())
    assert not second.query()
    before.set()
    second.synchronize()
    assert first.query()
    assert target.item() == 2


@pytest.mark.parametrize("early", [True, False])
def test_an_event_carries_the_error_that_kept_its_copy_from_being_made(lane: HostLane, *, early: bool) -> None:
    before, target = HostEvent(), flat(1)
    if early:
        before.set(OSError("lost"))
    failed = lane.copy([whole(target, flat(1, 9))], (before,))
    before.set(OSError("lost"))
    for _ in range(2):
        with pytest.raises(OSError, match="lost"):
            failed.synchronize()
    assert target.item() == 0
    lane.copy([whole(target, flat(1, 9))], ()).synchronize()


def test_an_idle_lane_keeps_no_memory_alive(lane: HostLane) -> None:
    source, target = flat(KiB), flat(KiB)
    weak = [StorageWeakRef(tensor.untyped_storage()) for tensor in (source, target)]
    lane.copy([whole(target, source)], ()).synchronize()
    del source, target
    assert eventually(lambda: all(ref.expired() for ref in weak))


def test_a_lane_that_closes_carries_out_what_it_was_given_and_what_comes_after_the_end(counters: Counters) -> None:
    """A graph may outlive its session; backward must not wait for a thread that is gone."""
    lane, target = HostLane("d2h", counters), flat(1)
    lane.copy([whole(flat(1), flat(1))], ())
    done = lane.copy([whole(target, flat(1, 9))], ())
    lane.close()
    assert (done.query(), target.item()) == (True, 9)
    late = lane.copy([whole(target, flat(1, 7))], ())
    assert (late.query(), target.item()) == (True, 7)


def test_a_slow_lane_takes_its_time_and_tells_once_how_long_its_copies_took(counters: Counters) -> None:
    lane = HostLane("h2d", counters, bytes_per_second=100 * MiB)
    now, start = HostEvent(), time.perf_counter()
    assert lane.over(now) == []
    for _ in range(2):
        lane.copy([whole(flat(2 * MiB), flat(2 * MiB))], ()).synchronize()
    assert time.perf_counter() - start >= 0.04
    first, second = lane.over(now)
    assert (first.lane, first.nbytes) == ("h2d", 2 * MiB)
    assert first.end - first.begin >= 0.02
    assert second.begin >= first.end
    assert lane.over(now) == []
    lane.close()


def test_threads_that_ask_at_once_share_what_there_is_to_tell(lane: HostLane) -> None:
    class Asked(deque[Transfer]):
        """Another thread takes one whenever this one does."""

        def popleft(self) -> Transfer:
            super().popleft()
            return super().popleft()

    one, other = (Transfer("d2h", MiB, 0.0, end) for end in (1.0, 2.0))
    lane._over = Asked([one, other])
    assert lane.over(HostEvent()) == [other]


def test_the_time_of_a_copy_is_without_what_it_had_to_wait_for(lane: HostLane) -> None:
    before = HostEvent()
    done = lane.copy([whole(flat(2 * MiB), flat(2 * MiB))], (before,))
    time.sleep(0.2)
    before.set()
    done.synchronize()
    (copy,) = lane.over(before)
    assert copy.end - copy.begin < 0.2


def test_small_copies_are_not_timed_and_no_more_than_are_needed(lane: HostLane) -> None:
    lane.copy([whole(flat(KiB), flat(KiB))], ()).synchronize()
    assert lane.over(HostEvent()) == []
    for _ in range(2 * TIMED):
        lane.copy([whole(flat(MiB), flat(MiB))], ()).synchronize()
    assert len(lane.over(HostEvent())) == TIMED


# --------------------------------------------------------------------------------------- a program's waits


def test_a_wait_is_a_stall_of_its_cause(counters: Counters) -> None:
    event = HostEvent()
    timer = threading.Timer(0.02, event.set)
    timer.start()
    HostCompute(counters).wait(event, "h2d", 0)
    assert list(counters.stalls) == ["h2d"]
    assert counters.stalls["h2d"].count == 1
    assert counters.stalls["h2d"].seconds > 0.01
    timer.join()


def test_what_is_over_is_no_stall(counters: Counters) -> None:
    compute = HostCompute(counters)
    compute.wait(compute.mark(compute.stream()), "h2d", compute.stream())
    assert counters.stalls == {}


def test_a_wait_raises_what_the_copy_raised(counters: Counters) -> None:
    event = HostEvent()
    event.set(OSError("lost"))
    with pytest.raises(OSError, match="lost"):
        HostCompute(counters).wait(event, "d2h", 0)
