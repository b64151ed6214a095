"""Keep everything: the program as it is."""

from __future__ import annotations

from migrator.links import Links
from migrator.plan import Plan
from migrator.planner.build import make_plan
from migrator.planner.sizes import least_room
from migrator.trace import Trace


def plan(trace: Trace, budget: int, links: Links) -> Plan:
    """Move nothing, whatever the budget."""
    return make_plan("keep", trace, (), max(least_room(trace, budget), trace.saved_bytes))
