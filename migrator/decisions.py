"""What a policy decides about storages and modules, and the plan that it amounts to. Pure functions."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from migrator.effects import effect
from migrator.plan import PageGroup, Plan, least_room, plan_of
from migrator.schedule import scheduled
from migrator.trace import Trace


@dataclass(frozen=True, slots=True)
class Trip:
    """A storage's way out of HBM and back.

    Attributes
    ----------
    bring_at, tier
        As of `PageGroup`.
    """

    bring_at: int | None = None
    tier: str | None = None


def assemble(
    policy: str,
    trace: Trace,
    budget: int,
    *,
    moved: Mapping[int, Trip] | None = None,
    dropped: Collection[int] = (),
    regions: Collection[str] = (),
) -> Plan:
    """The plan in which storages and modules go as decided, and all else stays.

    Storages that share a tier travel in groups, in the order of their deaths; a group may come back when the
    first of its members may.
    """
    moved = moved or {}
    tiers = {ident: trip.tier for ident, trip in moved.items() if trip.tier is not None}
    outcome = effect(trace, dropped, regions)
    plan = plan_of(policy, outcome, moved, least_room(trace, budget), regions=regions, tiers=tiers)
    plan = scheduled(plan, trace, outcome, budget)
    storage_of = {site.key: site.storage for site in trace.sites}

    def triggered(group: PageGroup) -> PageGroup:
        triggers = [moved[storage_of[key]].bring_at for key in group.sites]
        known = [at for at in triggers if at is not None]
        return replace(group, bring_at=min(known)) if len(known) == len(triggers) else group

    return replace(plan, groups=tuple(triggered(group) for group in plan.groups))
