"""Move everything: what a period does before anything is known, and the most the links can be asked for."""

from __future__ import annotations

from migrator.plan import Plan, learning_room, make_plan
from migrator.trace import Trace


def plan(trace: Trace, room: int) -> Plan:
    """Move every storage, with no more HBM than moving needs, whatever the room."""
    moved = {life.ident for life in trace.lifetimes}
    return make_plan("move", trace, moved, min(room, learning_room(trace.saved_bytes)))
