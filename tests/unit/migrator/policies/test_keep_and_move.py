from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.traces import traces
from torch_tiers.allocator.sizes import GiB
from torch_tiers.migrator.model.links import PCIE_GEN5
from torch_tiers.migrator.model.trace import Trace
from torch_tiers.migrator.planner.sizes import look_ahead
from torch_tiers.migrator.policies import keep, move

ROOMS = st.integers(0, 2 * GiB)


@given(traces(), ROOMS)
def test_keep_moves_nothing_and_has_room_for_it(trace: Trace, room: int) -> None:
    plan = keep.plan(trace, room, PCIE_GEN5)
    assert plan.groups == ()
    assert plan.room >= plan.kept_bytes == trace.saved_bytes


@given(traces(), ROOMS)
def test_move_keeps_nothing_and_takes_no_more_than_it_must(trace: Trace, room: int) -> None:
    plan = move.plan(trace, room, PCIE_GEN5)
    assert plan.kept_bytes == 0
    assert plan.moved_bytes == trace.saved_bytes
    assert plan.room <= max(room, look_ahead(max((life.nbytes for life in trace.lifetimes), default=0), room))
