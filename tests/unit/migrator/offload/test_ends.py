"""Groups that die, wherever they are: nothing is left of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.unit.by_hand import raising
from tests.unit.migrator.offload.rig import NBYTES, Held, Rig, assert_comes_back, assert_nothing_left
from torch_tiers.allocator.sizes import PAGE
from torch_tiers.migrator.offload.group import State


def filling(rig: Rig) -> Held:
    return rig.held(rig.group())


def leaving(rig: Rig) -> Held:
    rig.engine.hbm.limit = NBYTES
    return rig.offloaded()[0]


def away(rig: Rig) -> Held:
    return rig.offloaded()[0]


def away_for_good(rig: Rig) -> Held:
    held = away(rig)
    rig.out.run()
    return held


def coming_home(rig: Rig) -> Held:
    held = away_for_good(rig)
    rig.engine.hbm.limit = NBYTES
    rig.engine.begin_backward()
    assert held.group.state is State.HOME
    return held


def home_again(rig: Rig) -> Held:
    held = away_for_good(rig)
    for _ in range(2):
        held.use()
        rig.back.run()
    assert held.group.state is State.HOME
    return held


def home_for_another(rig: Rig) -> Held:
    used, unused = rig.offloaded(count=2)
    rig.out.run()
    used.use()
    used.die()
    return unused


@pytest.mark.parametrize("reach", [filling, leaving, away, away_for_good, coming_home, home_again, home_for_another])
def test_a_group_that_dies_leaves_nothing(rig: Rig, reach: Callable[[Rig], Held]) -> None:
    held = reach(rig)
    held.die()
    assert_nothing_left(rig)
    assert held.group.state is State.GONE
    assert held.memory.expired()
    assert held.group.buffer is None


def test_a_group_that_dies_on_its_way_out_makes_nobody_wait(rig: Rig) -> None:
    held = leaving(rig)
    assert held.group.stored is not None
    filled = held.group.stored.filled
    held.use()
    held.die()
    rig.engine.collect()
    assert rig.compute.waits == []
    assert rig.compute.outlasted == [(filled, 1)]  # whoever owns the memory is told that the lane still reads it


def test_neither_memory_that_a_lane_still_fills_nor_the_block_that_it_reads_is_reused_before() -> None:
    rig = Rig(dram=PAGE)
    held = coming_home(rig)
    assert held.group.stored is not None
    returned = held.group.stored.returned
    held.die()
    rig.engine.collect()
    assert returned in [event for event, _ in rig.compute.waits]
    rig.offloaded()
    _, after, _ = rig.out.jobs[-1]
    assert returned in after
    rig.back.run()
    rig.close()


def test_a_group_lives_as_long_as_one_of_its_tensors(rig: Rig) -> None:
    one, other = rig.offloaded(count=2)
    rig.out.run()
    one.use()
    one.die()
    rig.engine.collect()
    assert_comes_back(rig, other)
    other.die()
    assert_nothing_left(rig)


def test_a_failed_copy_keeps_no_block(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    group = rig.group()
    held = rig.held(group)
    with monkeypatch.context() as patch:
        patch.setattr(rig.out, "copy", raising(torch.OutOfMemoryError, "no room to gather in"))
        with pytest.raises(torch.OutOfMemoryError):
            rig.engine.offload(group)
    assert rig.arena.used == 0
    assert torch.equal(held.use(), held.expected)
