"""Schedules room and prefetches over the iteration, so that a plan fits at every position.

Forward: at each save HBM may hold what the budget leaves until the next one. What has not left by the last save
stays until it is used; so the last save asks for as much to leave, the oldest first, as the rest of the iteration
needs. Backward: a group comes back as early as all stretches until its use have room for it (G10, MICRO'23:
eager prefetching), in the order of uses. Pure functions on plain data.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from torch_tiers.migrator.model.plan import PageGroup, Plan
from torch_tiers.migrator.model.trace import Site, Trace
from torch_tiers.migrator.planner.build import plan_of
from torch_tiers.migrator.planner.effects import Effect, Held, effect
from torch_tiers.migrator.planner.intervals import Bytes, room


def scheduled(plan: Plan, trace: Trace, outcome: Effect, budget: int, lingering: Bytes | int = 0) -> Plan:
    """`plan` with limits and in-triggers; as it is where the trace does not tell what else lies in HBM.

    Parameters
    ----------
    plan : Plan
        What is kept, moved and recomputed.
    trace : Trace
        The iteration.
    outcome : Effect
        What the plan's choice brings about.
    budget : int
        HBM for saved tensors and `others`, in bytes.
    lingering : array of int
        Bytes that have left and lie there all the same, by stretch; see `migrator.simulator.Simulated`.
    """
    if not trace.others:
        return plan
    available = room(trace, budget) - outcome.again - lingering
    staying = [held for held in outcome.held.values() if held.holders[0].key in plan.keep]
    kept = occupied(staying, trace.positions)
    spans = spans_of(plan, outcome)
    gone, stay = _must_leave(plan.groups, spans, available - kept, trace.turn)
    triggers = _triggers(plan.groups, gone, spans, available - kept - occupied_by(stay, trace.positions), trace.turn)
    at_turn = int(kept[trace.turn + 1]) + sum(nbytes for begin, _, nbytes in stay if begin == trace.turn)
    limits = _limits(trace, outcome, available, at_turn)
    highest = max((most for pair in limits.values() for most in pair), default=plan.room)
    groups = tuple(replace(group, bring_at=triggers.get(number)) for number, group in enumerate(plan.groups))
    return replace(plan, room=max(highest, *(group.nbytes for group in groups), 0), groups=groups, limits=limits)


def fit(
    policy: str,
    trace: Trace,
    budget: int,
    moved: Collection[int],
    *,
    dropped: Collection[int] = (),
    tiers: Mapping[int, str] | None = None,
    lingering: Bytes | int = 0,
    outcome: Effect | None = None,
) -> Plan:
    """The plan of a choice for a budget: with limits and in-triggers where the trace tells what else lies in HBM.

    Parameters
    ----------
    policy : str
        Who decided.
    trace : Trace
        The iteration.
    budget : int
        HBM for saved tensors and `others`, in bytes.
    moved, dropped, tiers
        As `migrator.planner.build.make_plan` takes them.
    lingering
        As `scheduled` takes it.
    outcome : Effect, optional
        What the choice brings about, where it is known already.

    Raises
    ------
    Unobtainable
        If something is dropped that cannot be recomputed.
    """
    outcome = outcome or effect(trace, dropped)
    most = max(0, budget - min(trace.others, default=0))
    plan = plan_of(policy, outcome, moved, most, tiers=tiers or {})
    return scheduled(plan, trace, outcome, budget, lingering)


@dataclass(frozen=True, slots=True)
class Span:
    """A group over the iteration.

    Attributes
    ----------
    complete : int
        Position at which the last of its sites was saved.
    need : int or None
        Position at which it must be in HBM again; None if never.
    leave : int
        Position at which the last of its sites is asked for.
    """

    complete: int
    need: int | None
    leave: int


def spans_of(plan: Plan, outcome: Effect) -> list[Span]:
    """One span per group of the plan, in their order."""
    by_key = {held.holders[0].key: held for held in outcome.held.values()}
    spans = []
    for group in plan.groups:
        members = [by_key[key] for key in group.sites if key in by_key]
        complete, leave = max(held.complete for held in members), max(held.leave for held in members)
        # What is asked for before, of one that is saved again later, is still there.
        needs = [at for held in members for at in held.asked if at > complete]
        spans.append(Span(complete, min(needs, default=None), leave))
    return spans


def occupied(storages: Iterable[Held], positions: int) -> Bytes:
    """Bytes of storages that are held in HBM all along, by stretch."""
    return occupied_by(((held.birth, held.leave, held.nbytes) for held in storages), positions)


def occupied_by(windows: Iterable[tuple[int, int, int]], positions: int) -> Bytes:
    """Bytes that come at one position and are used for the last time at another, by stretch."""
    changes = np.zeros(positions + 2, dtype=np.int64)
    for birth, leave, nbytes in windows:
        changes[birth + 1] += nbytes
        changes[leave + 2] -= nbytes
    return np.cumsum(changes)[:-1]


Windows = list[tuple[int, int, int]]


def _must_leave(groups: Sequence[PageGroup], spans: list[Span], free: Bytes, turn: int) -> tuple[list[int], Windows]:
    """Groups that must have left HBM by the turn, by number; and from when to when the others lie there."""
    needed = [number for number, span in enumerate(spans) if span.need is not None]
    windows = {n: (max(turn, spans[n].complete), spans[n].leave, groups[n].nbytes) for n in needed}
    order = sorted((n for n in needed if spans[n].complete <= turn), key=lambda n: spans[n].complete)
    spare = (free - occupied_by(windows.values(), len(free) - 1))[turn + 1 :]
    gone = []
    for number in order:
        if spare.min(initial=0) >= 0:
            break
        spare[: spans[number].leave + 1 - turn] += groups[number].nbytes
        gone.append(number)
        del windows[number]
    return gone, list(windows.values())


def _triggers(
    groups: Sequence[PageGroup], gone: list[int], spans: list[Span], free: Bytes, turn: int
) -> dict[int, int]:
    """For each group that leaves, the earliest position from which there is room for it until its last use."""
    triggers = {}
    earliest = turn
    needed = [(need, number) for number in gone if (need := spans[number].need) is not None]
    for need, number in sorted(needed):
        nbytes = groups[number].nbytes
        crowded = np.flatnonzero(free[earliest + 1 : need + 1] < nbytes)
        if len(crowded):
            earliest += 1 + int(crowded[-1])
        earliest = min(earliest, need)
        free[earliest + 1 : spans[number].leave + 2] -= nbytes
        triggers[number] = earliest
    return triggers


def _limits(trace: Trace, outcome: Effect, available: Bytes, at_turn: int) -> dict[str, tuple[int, int]]:
    """Saved bytes that may lie in HBM from the birth, and from the first use, of every site that the hooks see."""
    seen = list(_seen(trace, outcome))
    if not seen:
        return {}
    # What is used for the last time is not counted any more, and lies in HBM for one stretch nevertheless.
    available = available.copy()
    for held in outcome.held.values():
        if any(holder.uses for holder in held.holders):
            available[held.leave + 1] -= held.nbytes
    positions = sorted({at for holder in seen for at in (holder.birth, *holder.uses[:1])})
    least = np.minimum.reduceat(available, [at + 1 for at in positions]).clip(min=0)
    limit = dict(zip(positions, least.tolist(), strict=True))
    if trace.turn in limit:
        limit[trace.turn] = min(limit[trace.turn], at_turn)
    return {holder.key: (limit[holder.birth], limit[(holder.uses or (holder.birth,))[0]]) for holder in seen}


def limits_by_position(plan: Plan, trace: Trace, outcome: Effect) -> dict[int, int]:
    """From which position on the room of a plan is which."""
    limits: dict[int, int] = {}
    for holder in _seen(trace, outcome) if plan.limits else ():
        if holder.key in plan.limits:
            limits[holder.birth], from_use = plan.limits[holder.key]
            if holder.uses:
                limits[holder.uses[0]] = from_use
    return limits


def _seen(trace: Trace, outcome: Effect) -> Iterator[Site]:
    """All that the hooks see being saved."""
    for held in outcome.held.values():
        yield from held.holders
    for key in outcome.recomputed:
        yield trace.by_key[key]
