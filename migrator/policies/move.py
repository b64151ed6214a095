"""Move everything: the most the links can be asked for."""

from __future__ import annotations

from torch_tiers.migrator.model.links import Links
from torch_tiers.migrator.model.plan import Plan
from torch_tiers.migrator.model.trace import Trace
from torch_tiers.migrator.planner.build import make_plan
from torch_tiers.migrator.planner.sizes import GROUPS_AHEAD, WORTH, learning_room, least_room

GROUPS = 2 * GROUPS_AHEAD  # as many at least lie in HBM, on their way out and on their way back


def plan(trace: Trace, budget: int, links: Links) -> Plan:
    """Move every storage, with no more HBM than it takes to keep the links busy, whatever the budget."""
    moved = {life.ident for life in trace.lifetimes}
    largest = max((life.nbytes for life in trace.lifetimes), default=0)
    under_way = max(learning_room(trace.saved_bytes), GROUPS_AHEAD * largest, GROUPS * WORTH)
    room = min(least_room(trace, budget), under_way)
    return make_plan("move", trace, moved, room, least_group=min(WORTH, room // GROUPS))
