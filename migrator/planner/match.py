"""Checks that a plan belongs to the trace that was read with it. Pure functions on plain data."""

from __future__ import annotations

from torch_tiers.migrator.model.fields import BadField
from torch_tiers.migrator.model.plan import Plan
from torch_tiers.migrator.model.trace import Trace
from torch_tiers.migrator.planner.effects import Unobtainable, effect


def check_match(plan: Plan, trace: Trace) -> None:
    """See whether the trace has what the plan refers to, as `simulate` takes for granted.

    Raises
    ------
    BadField
        If it has not: the files are of two runs.
    """
    missing = [key for key in plan.recompute if key not in trace.by_key]
    if missing:
        raise BadField("plan", f"recomputes {missing[0]!r}, which is not in the trace beside it")
    try:
        outcome = effect(trace, {trace.by_key[key].storage for key in plan.recompute})
    except Unobtainable as error:
        raise BadField("plan", f"is not of the trace beside it: {error}") from None
    known = {held.holders[0].key for held in outcome.held.values()}
    for number, group in enumerate(plan.groups):
        if known.isdisjoint(group.sites) or not trace.by_key.keys() >= set(group.sites):
            raise BadField(f"groups[{number}].sites", "are not of the trace beside it")
