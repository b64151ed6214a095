"""Keep everything: the program as it is."""

from __future__ import annotations

from torch_tiers.migrator.model.links import Links
from torch_tiers.migrator.model.plan import Plan
from torch_tiers.migrator.model.trace import Trace
from torch_tiers.migrator.planner.build import make_plan
from torch_tiers.migrator.planner.sizes import least_room


def plan(trace: Trace, budget: int, links: Links) -> Plan:
    """Move nothing, whatever the budget."""
    return make_plan("keep", trace, (), max(least_room(trace, budget), trace.saved_bytes))
