"""What the engine says of an iteration."""

from __future__ import annotations

from tests.unit.migrator.offload.rig import NBYTES, Rig, assert_nothing_left
from torch_tiers.migrator.offload.group import State


def test_the_iteration_counts_what_is_still_alive(rig: Rig) -> None:
    held = rig.held(rig.group())
    rig.engine.enter(5)
    rig.engine.end_iteration()
    assert rig.engine.hbm.resident == NBYTES
    held.use()
    assert rig.engine.hbm.resident == 0


def test_what_leaves_twice_is_subtracted_once(rig: Rig) -> None:
    held = rig.held(rig.group())
    rig.engine.enter(5)
    rig.engine.leave(5)
    rig.engine.leave(5)
    assert rig.engine.hbm.resident == NBYTES
    held.die()
    assert_nothing_left(rig)


def test_the_peak_is_that_of_the_iteration(rig: Rig) -> None:
    rig.compute.static = 1000
    rig.engine.enter(50)
    rig.engine.begin_backward()
    rig.engine.leave(50)
    assert rig.engine.end_iteration() == 1050
    assert rig.engine.end_iteration() == 1000


def test_bytes_that_stay_push_groups_out(rig: Rig) -> None:
    rig.engine.hbm.limit = 2 * NBYTES
    (held,) = rig.offloaded()
    rig.engine.enter(NBYTES + 1)
    assert held.group.state is State.AWAY
