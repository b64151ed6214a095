"""What is left of shared memory is never taken to be more than was seen."""

from __future__ import annotations

import errno
import time

import pytest

from torch_tiers.allocator.host.dram import DramArena
from torch_tiers.allocator.host.room import FRESH, Room, RoomWatch
from torch_tiers.allocator.sizes import PAGE, MiB


class System:
    """Leaves `nbytes`; None: it cannot be looked at."""

    def __init__(self, nbytes: int | None) -> None:
        self.nbytes = nbytes

    def room(self) -> Room:
        if self.nbytes is None:
            raise OSError(errno.EMFILE, "Too many open files", "/proc/meminfo")
        return Room(self.nbytes, "the others are many")


def test_where_nothing_limits_any_share_may_be_taken() -> None:
    watch = RoomWatch(None)
    assert not watch.watches
    assert watch.share(1 << 50) >= 1 << 50


def test_before_the_first_look_that_succeeds_nothing_is_left_and_nothing_is_to_be_given_back() -> None:
    system = System(None)
    watch = RoomWatch(system.room)
    assert (watch.seen, watch.share(PAGE)) == (0, 0)
    system.nbytes = 64 * PAGE
    time.sleep(2 * FRESH)
    assert (watch.share(PAGE), watch.seen) == (2 * PAGE, 64 * PAGE)


def test_after_a_look_that_fails_what_was_seen_last_counts() -> None:
    system = System(8 * PAGE)
    watch = RoomWatch(system.room)
    watch.taken(PAGE)
    system.nbytes = None
    time.sleep(2 * FRESH)
    assert watch.left() == 7 * PAGE


def test_an_arena_that_cannot_look_says_why_it_waits_and_goes_on_when_it_can(caplog: pytest.LogCaptureFixture) -> None:
    system = System(None)
    arena = DramArena(64 * MiB, pinned=False, step=PAGE, room=system.room)
    assert arena.allocate(PAGE) is None
    assert [record.getMessage() for record in caplog.records] == [
        "dram stays at 0 B of 64.0 MiB for now: what the system leaves cannot be read: "
        "[Errno 24] Too many open files: '/proc/meminfo'"
    ]
    system.nbytes = 64 * PAGE
    time.sleep(2 * FRESH)
    assert arena.allocate(PAGE) is not None
    arena.close()
