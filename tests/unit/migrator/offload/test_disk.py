"""Groups past the capacity of DRAM."""

from __future__ import annotations

import threading

import pytest

from tests.unit.by_hand import HandStore, raising
from tests.unit.migrator.offload.rig import NBYTES, Rig, assert_comes_back, assert_nothing_left
from torch_tiers.allocator.sizes import PAGE
from torch_tiers.migrator.offload.disk import Disk
from torch_tiers.migrator.telemetry.counters import Counters


def test_groups_past_dram_come_back_from_disk(disk: Rig) -> None:
    groups = []
    for next_use in reversed(range(10)):
        groups.append(disk.offloaded(next_use)[0])
        disk.out.run()
    disk.engine.hbm.limit = 2 * NBYTES
    disk.engine.begin_backward()
    for held in reversed(groups):
        assert_comes_back(disk, held)
        held.die()
    assert_nothing_left(disk)


def test_a_group_goes_to_the_tier_that_the_plan_names(disk: Rig) -> None:
    named = []
    for tier in ("nvme", "dram", None):
        group = disk.group()
        group.tier = tier
        named.append(disk.held(group))
        disk.engine.offload(group)
        disk.out.run()
    stored_groups = [held.group.stored for held in named]
    assert [stored is not None and stored.extent is not None for stored in stored_groups] == [True, False, False]
    for _ in range(3):  # DRAM runs short: what is to stay there goes last, though it is needed no sooner
        disk.offloaded(next_use=-1)
        disk.out.run()
    assert stored_groups[2] is not None and stored_groups[2].extent is not None
    assert stored_groups[1] is not None and stored_groups[1].extent is None
    for held in named:
        assert_comes_back(disk, held)


def test_requests_find_their_threads_and_ask_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused for want of one, a request ran later, into a block that by then was another's."""
    disk = Disk(HandStore(8 * PAGE), Counters())  # type: ignore[arg-type]

    monkeypatch.setattr(threading.Thread, "start", raising(RuntimeError, "can't start new thread"))
    ran = threading.Semaphore(0)
    disk._readers.read(ran.release)
    disk._writers.write(ran.release)
    assert all(ran.acquire(timeout=10) for _ in range(2))
    with pytest.raises(RuntimeError, match="new thread"):
        Disk(HandStore(8 * PAGE), Counters())  # type: ignore[arg-type]
    monkeypatch.undo()
    disk.close()
