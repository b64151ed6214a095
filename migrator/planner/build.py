"""Builds a plan from a choice of storages: which sites move together, in what order, and which stay."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

from torch_tiers.allocator.layout.groups import group_by_death
from torch_tiers.allocator.layout.lifetimes import Lifetime
from torch_tiers.migrator.model.plan import Keep, PageGroup, Plan
from torch_tiers.migrator.model.trace import Trace
from torch_tiers.migrator.planner.effects import Effect, effect
from torch_tiers.migrator.planner.sizes import group_bytes

_NOWHERE: Mapping[int, str] = MappingProxyType({})


def make_plan(
    policy: str,
    trace: Trace,
    moved: Collection[int],
    room: int,
    *,
    dropped: Collection[int] = (),
    tiers: Mapping[int, str] = _NOWHERE,
    least_group: int = 0,
) -> Plan:
    """The plan in which the storages `moved` move, those `dropped` are recomputed, and all others stay.

    Its room is `room`, but never less than the largest group: that much of HBM every group needs once.
    `migrator.planner.schedule` adds a room that changes on the way, and in-triggers.

    Parameters
    ----------
    policy : str
        Who decided.
    trace : Trace
        The iteration.
    moved : collection of int
        Storages that move. What is dropped does not.
    room : int
        Saved bytes that may lie in HBM at once.
    dropped : collection of int
        Storages that are recomputed by their recipes.
    tiers : mapping of int to str
        Where storages go that move; those without an entry go where there is room.
    least_group : int
        Bytes that a group has at least, where so much moves.

    Raises
    ------
    Unobtainable
        If something is dropped that cannot be recomputed.
    """
    outcome = effect(trace, dropped)
    return plan_of(policy, outcome, moved, room, tiers=tiers, least_group=least_group)


def plan_of(
    policy: str,
    outcome: Effect,
    moved: Collection[int],
    room: int,
    *,
    tiers: Mapping[int, str] = _NOWHERE,
    least_group: int = 0,
) -> Plan:
    """`make_plan` for who knows already what its choice brings about."""
    moving: dict[str | None, list[Lifetime]] = {}
    keep: dict[str, Keep] = {}
    for held in outcome.held.values():
        if held.nbytes and held.ident in moved:
            life = Lifetime(held.ident, held.nbytes, held.birth, tuple(held.asked))
            moving.setdefault(tiers.get(held.ident), []).append(life)
        else:
            last = max(held.holders, key=lambda holder: holder.uses[-1:])
            for holder in held.holders:
                enters, leaves = holder is held.holders[0], holder is last and bool(holder.uses)
                keep[holder.key] = Keep(held.nbytes if enters else 0, held.nbytes if leaves else 0)
    nbytes = max(group_bytes(room), least_group)
    groups = [(tier, group) for tier, lives in moving.items() for group in group_by_death(lives, nbytes)]
    groups.sort(key=lambda entry: (not entry[1][0].uses, entry[1][0].death))
    return Plan(
        policy,
        max(room, *(sum(life.nbytes for life in group) for _, group in groups), 0),
        keep,
        tuple(
            PageGroup(
                sites=tuple(holder.key for life in group for holder in outcome.held[life.ident].holders),
                nbytes=sum(life.nbytes for life in group),
                # Not the first save of each: what the shortcut of a block saves again has not come by then.
                last_birth=max(outcome.held[life.ident].complete for life in group),
                first_use=min((life.uses[0] for life in group if life.uses), default=None),
                tier=tier,
            )
            for tier, group in groups
        ),
        outcome.recomputed,
    )
