"""Groups past the capacity of DRAM."""

from __future__ import annotations

import torch

from tests.unit.migrator.offload.rig import NBYTES, Rig, assert_nothing_left


def test_groups_past_dram_come_back_from_disk(disk: Rig) -> None:
    groups = []
    for next_use in reversed(range(10)):
        groups.append(disk.offloaded(next_use)[0])
        disk.out.run()
    disk.engine.limit = 2 * NBYTES
    disk.engine.begin_backward()
    for held in reversed(groups):
        view = held.use()
        disk.back.run()
        assert torch.equal(view, held.expected)
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
        view = held.use()
        disk.back.run()
        assert torch.equal(view, held.expected)
