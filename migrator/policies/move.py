"""Move everything: the most the links can be asked for."""

from __future__ import annotations

from migrator.links import Links
from migrator.plan import GROUPS_AHEAD, Plan, learning_room, least_room, make_plan
from migrator.trace import Trace


def plan(trace: Trace, budget: int, links: Links) -> Plan:
    """Move every storage, with no more HBM than it takes to keep the links busy, whatever the budget."""
    moved = {life.ident for life in trace.lifetimes}
    largest = max((life.nbytes for life in trace.lifetimes), default=0)
    under_way = max(learning_room(trace.saved_bytes), GROUPS_AHEAD * largest)
    return make_plan("move", trace, moved, min(least_room(trace, budget), under_way))
