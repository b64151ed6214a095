"""Groups that leave HBM: when their memory is released, and in whose order."""

from __future__ import annotations

import pytest
import torch

from tests.unit.migrator.offload.rig import NBYTES, Held, Rig, assert_comes_back
from torch_tiers.allocator.errors import TierFull
from torch_tiers.allocator.sizes import PAGE, MiB
from torch_tiers.migrator.offload.group import State
from torch_tiers.migrator.streams.pieces import SLOT


def test_only_over_the_limit_memory_is_released_that_of_the_oldest_first(rig: Rig) -> None:
    rig.engine.hbm.limit = 2 * NBYTES
    held = [rig.offloaded()[0] for _ in range(4)]
    assert [each.group.state for each in held] == [State.AWAY, State.AWAY, State.LEAVING, State.LEAVING]
    assert rig.engine.hbm.resident == 2 * NBYTES
    rig.out.run()
    assert [each.memory.expired() for each in held] == [True, True, False, False]
    assert [each.saved.alias.untyped_storage().nbytes() for each in held] == [0, 0, NBYTES, NBYTES]


def test_a_group_that_fills_makes_others_go_and_not_only_once_it_is_full(rig: Rig) -> None:
    rig.engine.hbm.limit = NBYTES
    (leaving,) = rig.offloaded()
    rig.held(rig.group())
    assert leaving.group.state is State.AWAY
    assert rig.engine.hbm.resident == NBYTES


def test_a_meter_is_told_once_of_all_that_is_released_and_what_there_was_until_then(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []
    rig.engine.meter = rig.compute.meter()
    monkeypatch.setattr(rig.engine.meter, "part", told.append)
    rig.engine.hbm.limit = 9 * NBYTES
    rig.offloaded(count=3)
    rig.offloaded(count=2)
    assert told == []
    rig.engine.hbm.limit = 0
    rig.engine.relieve()
    assert told == [5 * NBYTES]  # once for both


def test_a_tensor_saved_again_after_its_storage_left_holds_no_memory(rig: Rig) -> None:
    x = torch.zeros(NBYTES, dtype=torch.uint8)
    group = rig.group()
    first = Held(rig.engine, group, x)
    rig.engine.offload(group)
    again = Held(rig.engine, group, x, first.saved)
    rig.out.run()
    del x
    assert again.memory.expired()
    assert again.use().numel() == NBYTES


def test_a_group_without_members_does_not_leave(rig: Rig) -> None:
    rig.engine.offload(rig.group())
    assert rig.out.copies == 0


def test_members_lie_in_slots_as_they_were_saved(rig: Rig) -> None:
    group = rig.group()
    members = [rig.held(group, nbytes) for nbytes in (1, 5 * MiB, 700, 6 * MiB)]
    rig.engine.offload(group)
    assert [held.saved.offset for held in members] == [0, SLOT, SLOT + 5 * MiB, 3 * SLOT + 5 * MiB]
    rig.out.run()
    for held in members:
        assert_comes_back(rig, held)


def test_a_full_tier_leaves_the_group_where_it_is(rig: Rig) -> None:
    small = Rig(dram=PAGE)
    (first,) = small.offloaded()
    group = small.group()
    second = small.held(group)
    with pytest.raises(TierFull, match="tier dram is full"):
        small.engine.offload(group)
    assert torch.equal(second.saved.alias, second.expected)
    first.die()
    small.out.run()
    small.engine.offload(group)
    assert group.state is State.AWAY
    small.close()


def test_a_group_leaves_and_is_released_in_the_order_of_the_stream_it_was_made_on(rig: Rig) -> None:
    group = rig.group()
    rig.held(group)
    rig.compute.current = 2
    rig.engine.offload(group)
    assert rig.out.followed == [1]
    assert group.stored is not None
    assert rig.compute.waits == [(group.stored.filled, 1)]
