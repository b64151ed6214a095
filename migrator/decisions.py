"""What a policy decides about storages and modules, and the plan that it amounts to. Pure functions."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from migrator.plan import PageGroup, Plan, checkpoint_key, least_room, make_plan
from migrator.trace import Region, Site, Trace


@dataclass(frozen=True, slots=True)
class Trip:
    """A storage's way out of HBM and back: see `PageGroup` for both."""

    bring_at: int | None = None
    tier: str | None = None


def uppermost(trace: Trace, paths: Collection[str]) -> tuple[Region, ...]:
    """The regions `paths`, without those that lie within another of them."""
    chosen: list[Region] = []
    for region in sorted((r for r in trace.regions if r.path in paths), key=lambda r: (r.begin, -r.end)):
        if not chosen or region.begin >= chosen[-1].end:
            chosen.append(region)
    return tuple(chosen)


def held(trace: Trace, recompute: Collection[int] = (), regions: Collection[str] = ()) -> Trace:
    """The trace of the same period when the storages `recompute` and the modules `regions` are made again.

    What is made again is no site any more, and counts among `others` while it is there. What it is made
    from is needed when it is: a recipe's inputs are used where its storage was, and a region's inputs
    become sites under the keys that a checkpoint gives them, used where backward enters the region.
    """
    nbytes = {life.ident: life.nbytes for life in trace.lifetimes}
    deaths = {life.ident: life.death for life in trace.lifetimes}
    added = [0] * (trace.positions + 2)  # to `others`, as changes from one position to the next

    def there(storage: int, first: int, last: int) -> None:
        added[first + 1] += nbytes.get(storage, 0)
        added[last + 2] -= nbytes.get(storage, 0)

    sites = list(trace.sites)
    for region in uppermost(trace, regions):
        inside = [site for site in sites if region.begin <= site.birth < region.end]
        sites = [site for site in sites if not region.begin <= site.birth < region.end]
        entered = min((site.uses[0] for site in inside if site.uses), default=None)
        entries = () if entered is None else (entered,)
        for number, storage in enumerate(region.inputs):
            key = checkpoint_key(region.path, number)
            sites.append(Site(key, storage, nbytes.get(storage, 0), region.begin, entries))
        outside = {site.storage for site in sites}
        for storage in {site.storage for site in inside if site.uses} - outside:
            assert entered is not None
            there(storage, entered, deaths.get(storage, entered))
    sites.sort(key=lambda site: site.birth)

    needed: dict[int, set[int]] = {}  # uses that come to a storage as a recipe's input
    for site in sites:
        if site.storage in recompute:
            sources = inputs_of(trace, site.storage, recompute)
            for use in site.uses:
                there(site.storage, use, use)
                for source in sources:
                    needed.setdefault(source, set()).add(use)
    rest = []
    for site in sites:
        if site.storage not in recompute:
            more = needed.pop(site.storage, set())
            rest.append(replace(site, uses=tuple(sorted({*site.uses, *more}))) if more else site)

    others = list(trace.others) or [0] * (trace.positions + 1)
    grown = 0
    for position in range(len(others)):
        grown += added[position]
        others[position] += grown
    return replace(trace, sites=tuple(rest), others=tuple(others) if any(added) or trace.others else ())


def inputs_of(trace: Trace, storage: int, recompute: Collection[int]) -> set[int]:
    """The storages that stay or move from which `storage` is made again, through others of `recompute`."""
    found: set[int] = set()
    stack = [*trace.recipes[storage].inputs]
    while stack:
        source = stack.pop()
        if source in recompute:
            stack.extend(trace.recipes[source].inputs)
        else:
            found.add(source)
    return found


def assemble(
    policy: str,
    trace: Trace,
    budget: int,
    *,
    moved: Mapping[int, Trip] | None = None,
    recompute: Collection[int] = (),
    regions: Collection[str] = (),
) -> Plan:
    """The plan in which storages and modules go as decided, and all else stays.

    Storages that share a tier travel in groups, in the order of their deaths; a group comes back when the
    first of its members is to.
    """
    moved = moved or {}
    rest = held(trace, recompute, regions)
    room = least_room(rest, budget)
    trips = {site.key: moved[site.storage] for site in rest.sites if site.storage in moved}
    there = {life.ident for life in rest.lifetimes}
    groups: list[PageGroup] = []
    for tier in sorted({trip.tier for trip in moved.values()}, key=str):
        together = [ident for ident, trip in moved.items() if trip.tier == tier and ident in there]
        for group in make_plan(policy, rest, together, room).groups:
            triggers = [trips[key].bring_at for key in group.sites]
            known = [trigger for trigger in triggers if trigger is not None]
            groups.append(replace(group, tier=tier, bring_at=min(known) if len(known) == len(triggers) else None))
    return replace(
        make_plan(policy, rest, [ident for ident in moved if ident in there], room),
        groups=tuple(sorted(groups, key=lambda g: (g.first_use is None, g.first_use or 0))),
        recompute=tuple(site.key for site in _outside(trace, regions) if site.storage in recompute),
        regions=tuple(region.path for region in uppermost(trace, regions)),
    )


def _outside(trace: Trace, regions: Collection[str]) -> list[Site]:
    chosen = uppermost(trace, regions)
    return [site for site in trace.sites if not any(r.begin <= site.birth < r.end for r in chosen)]
