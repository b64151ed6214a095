"""The limits and prefetches of a plan, site by site: the room from there on, and groups that may return. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch_tiers.migrator.model.plan import Plan
from torch_tiers.migrator.model.trace import Trace

COARSE = 64  # one part in so many of the room: as closely as it is followed where no group waits for it

Change = tuple[int, str, int]
"""A position, the site that comes there, and the room from there on."""


class Pace(NamedTuple):
    """When a site comes in the plan's iteration, and what its room is from there on.

    `saved/native/occupancy.h` reads the fields by their order.

    Attributes
    ----------
    birth, use : int
        Positions at which it is saved, and first asked for.
    from_birth, from_use : int or None
        Saved bytes that may lie in HBM from then on; None: as many as before.
    """

    birth: int
    use: int
    from_birth: int | None
    from_use: int | None


def paces(plan: Plan, trace: Trace) -> dict[str, Pace]:
    """By site, when it comes and what room there is from then on; of those alone that have anything to tell."""
    if not plan.limits and all(group.bring_at is None for group in plan.groups):
        return {}
    times = {site.key: (site.birth, min(site.uses, default=-1)) for site in trace.sites}
    if not plan.groups:
        return _coarse(plan, times)
    return {key: Pace(birth, use, *plan.limits.get(key, (None, None))) for key, (birth, use) in times.items()}


def _coarse(plan: Plan, times: dict[str, tuple[int, int]]) -> dict[str, Pace]:
    """Nothing of the plan's leaves or comes back: the room is for what nobody has foreseen, and need not be exact.

    To follow it takes the host half a microsecond a site, twice. It is never more than the plan's.
    """
    births = [(times[key][0], key, birth) for key, (birth, _) in plan.limits.items() if key in times]
    uses = [(times[key][1], key, use) for key, (_, use) in plan.limits.items() if times.get(key, (0, -1))[1] >= 0]
    least_at: dict[tuple[int, str], int] = {}
    for first, least in _steps(sorted(births + uses), plan.room // COARSE):
        least_at[first] = least
    found = {}
    for key, (birth, use) in times.items():
        from_birth, from_use = least_at.get((birth, key)), least_at.get((use, key))
        if from_birth is not None or from_use is not None:
            found[key] = Pace(birth, use, from_birth, from_use)
    return found


def _steps(changes: Sequence[Change], tolerance: int) -> Iterator[tuple[tuple[int, str], int]]:
    """Runs of changes that differ by no more than the tolerance: where each begins, and its least room."""
    begin = 0
    low = high = 0
    for at, (_, _, now) in enumerate(changes):
        if at > begin and max(high, now) - min(low, now) > tolerance:
            yield changes[begin][:2], low
            begin = at
        low, high = (now, now) if at == begin else (min(low, now), max(high, now))
    if changes:
        yield changes[begin][:2], low
