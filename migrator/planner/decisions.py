"""Decisions for single storages (where each goes, and when it returns), and the plan they amount to. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from torch_tiers.migrator.model.plan import PageGroup, Plan
from torch_tiers.migrator.model.trace import Trace
from torch_tiers.migrator.planner.schedule import fit


@dataclass(frozen=True, slots=True)
class Trip:
    """A storage's way out of HBM and back.

    Attributes
    ----------
    bring_at : int or None
        Position from which it may come back; None as soon as there is room.
    tier : str or None
        Where it goes; None leaves it to what is free.
    """

    bring_at: int | None = None
    tier: str | None = None


def assemble(policy: str, trace: Trace, budget: int, trips: Mapping[int, Trip], dropped: Collection[int] = ()) -> Plan:
    """The plan in which storages travel, or are recomputed, as decided, and all others stay.

    Those that share a tier travel in groups, in the order of their deaths; a group may come back when the first of
    its members may, but not before the schedule has room for it.
    """
    tiers = {ident: trip.tier for ident, trip in trips.items() if trip.tier is not None}
    plan = fit(policy, trace, budget, trips, dropped=dropped, tiers=tiers)

    def triggered(group: PageGroup) -> PageGroup:
        triggers = [trips[trace.by_key[key].storage].bring_at for key in group.sites]
        known = [at for at in triggers if at is not None]
        if group.first_use is None or len(known) < len(triggers):
            return group
        return replace(group, bring_at=min(max(min(known), group.bring_at or 0), group.first_use))

    return replace(plan, groups=tuple(triggered(group) for group in plan.groups))
