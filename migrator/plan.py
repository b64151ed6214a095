"""The plan: for each site keep, move or recompute, and which sites travel together. Plain data, `plan.json`."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field

from allocator.groups import group_by_death
from allocator.sizes import PAGE, GiB, MiB, round_up
from migrator.trace import Trace

FULL_SPEED = 64 * MiB  # a copy of this size runs at the link's full speed, with room to spare
GROUPS_AHEAD = 2  # one group on the link and one behind it keep the link busy


@dataclass(frozen=True, slots=True)
class Keep:
    """A site whose tensor stays in HBM.

    Attributes
    ----------
    enter : int
        Bytes it adds to HBM when saved: its storage's, 0 if an earlier site brought that.
    leave : int
        Bytes that leave HBM when it was used: its storage's at the last use, else 0.
    """

    enter: int
    leave: int


@dataclass(frozen=True, slots=True, eq=False)
class PageGroup:
    """Sites that leave as one and come back as one. Told apart by identity, as each is looked up often.

    Attributes
    ----------
    sites : tuple of str
        Keys of the sites.
    nbytes : int
        Bytes of their storages.
    last_birth : int
        Position at which the group is complete.
    first_use : int or None
        Position at which backward first asks for one of them; None if it never does.
    bring_at : int or None
        In-trigger: the position from which it may come back; None as soon as there is room.
    tier : str or None
        Where it goes: ``dram`` or ``nvme``; None leaves it to what is free.
    """

    sites: tuple[str, ...]
    nbytes: int
    last_birth: int
    first_use: int | None
    bring_at: int | None = None
    tier: str | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """What one policy decided for one trace.

    Attributes
    ----------
    policy : str
        Who decided.
    room : int
        Saved bytes that may lie in HBM at once: those kept, those leaving and those back.
    keep : mapping of str to Keep
        Sites that stay.
    groups : tuple of PageGroup
        Sites that move, in the order of their deaths.
    recompute : tuple of str
        Sites whose tensor is dropped and made again by its recipe when backward asks for it.
    regions : tuple of str
        Paths of the modules that are recomputed as a whole. The sites within are in no other field; what a
        checkpoint saves of its own, its inputs, comes under the keys that `checkpoint_key` makes.
    limits : mapping of str to (int, int)
        How `room` changes on the way: from this site's birth on, and from its first use on. Empty: it does not.

    A site that is nowhere was not foreseen; it moves, in a group of its period's own.
    """

    policy: str
    room: int
    keep: Mapping[str, Keep]
    groups: tuple[PageGroup, ...]
    recompute: tuple[str, ...] = ()
    regions: tuple[str, ...] = ()
    limits: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def kept_bytes(self) -> int:
        """Bytes that stay in HBM."""
        return sum(keep.enter for keep in self.keep.values())

    @property
    def moved_bytes(self) -> int:
        """Bytes that leave HBM, and come back, once a period."""
        return sum(group.nbytes for group in self.groups)

    @property
    def parcel_bytes(self) -> int:
        """Bytes that the groups take below HBM, in whole pages."""
        return sum(round_up(group.nbytes, PAGE) for group in self.groups)

    def to_json(self) -> str:
        """One JSON object."""
        return json.dumps(asdict(self))


def checkpoint_key(path: str, number: int) -> str:
    """Key of the site that holds input `number` of the region `path` while it is recomputed as a whole."""
    return f"{path}/in:{number}"


def least_room(trace: Trace, budget: int) -> int:
    """Saved bytes that `budget` has room for at every position of the period."""
    return max(0, budget - max(trace.others, default=0))


def group_bytes(room: int) -> int:
    """Size of a page group under `room` bytes: a sixteenth of it, between a page and full speed's 64 MiB."""
    return min(FULL_SPEED, max(PAGE, room // 16))


def learning_room(budget: int) -> int:
    """Saved bytes that may lie in HBM before anything is known: an eighth of the budget, 1 GiB at most."""
    return min(GiB, budget // 8)


def look_ahead(largest: int, room: int) -> int:
    """Bytes of HBM, out of `room`, for groups under way, when the largest storage that moves has `largest` bytes."""
    return GROUPS_AHEAD * max(largest, group_bytes(room)) if largest else 0


def make_plan(policy: str, trace: Trace, moved: Collection[int], room: int) -> Plan:
    """The plan in which the storages `moved` move and all others stay.

    Its room is `room`, but never less than the largest group: that much of HBM every group needs once.
    """
    lives = {life.ident: life for life in trace.lifetimes}
    sites: dict[int, list[str]] = {}
    keep: dict[str, Keep] = {}
    for site in trace.sites:
        life = lives.get(site.storage)
        if life is None:
            keep[site.key] = Keep(0, 0)
        elif site.storage in moved:
            sites.setdefault(site.storage, []).append(site.key)
        else:
            first, last = site.birth == life.birth, bool(site.uses) and site.uses[-1] == life.death
            keep[site.key] = Keep(life.nbytes if first else 0, life.nbytes if last else 0)
    groups = group_by_death((lives[ident] for ident in moved), group_bytes(room))
    return Plan(
        policy,
        max(room, *(sum(life.nbytes for life in group) for group in groups), 0),
        keep,
        tuple(
            PageGroup(
                sites=tuple(key for life in group for key in sites[life.ident]),
                nbytes=sum(life.nbytes for life in group),
                last_birth=max(life.birth for life in group),
                first_use=min((life.uses[0] for life in group if life.uses), default=None),
            )
            for group in groups
        ),
    )
