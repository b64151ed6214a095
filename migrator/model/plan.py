"""The plan: keep, move or recompute for each site, and the groups in which sites move. Plain data, `plan.json`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from operator import attrgetter

from torch_tiers.allocator.errors import TiersError
from torch_tiers.allocator.sizes import PAGE, format_at_least, format_size, round_up
from torch_tiers.migrator.model.fields import MOST_BYTES, BadField, items, mapping, no_others, parse, record, whole
from torch_tiers.migrator.model.fields import field as value_of
from torch_tiers.migrator.model.fields import text as string
from torch_tiers.migrator.model.trace import MOST_POSITIONS, MOST_SITES

_MOST_OF_ALL = MOST_SITES * MOST_BYTES  # bytes of all of a plan
FRAGMENTS = 0.05  # of a GPU's budget that plans leave free: what PyTorch's allocator reserves beyond what it allocates
LAYOUTS = 0.02  # the same of ours: layouts had up to 1.3% of the budget in DRAM, where a step takes twice as long
WITHOUT_LAYOUT = 0.03  # besides, where iterations differ in size: best fit mapped 3.5% more than was alive of an MoE
READ_AHEAD = 8  # groups that may be on their way from disk before HBM has room for them


class NoPlanFits(TiersError):
    """No plan for the iteration stays within the budget.

    Attributes
    ----------
    budget : int
        The budget that was asked for, in bytes.
    smallest : int
        The smallest budget for which there is a plan.
    holds : str
        What lies in HBM at the peak of that plan, and where the peak is.
    """

    def __init__(self, budget: int, smallest: int, holds: str) -> None:
        super().__init__(
            f"no plan keeps this program within {format_size(budget)} of hbm: it needs {format_at_least(smallest)} "
            f"({holds}); raise TIERS_HBM above that, or make the batch smaller"
        )
        self.budget = budget
        self.smallest = smallest
        self.holds = holds

    def __reduce__(self) -> tuple[type[NoPlanFits], tuple[int, int, str]]:
        return NoPlanFits, (self.budget, self.smallest, self.holds)  # plans are made in another process

    def out_of(self, budget: int) -> NoPlanFits:
        """Return the same error for the budget that `self.budget` was a part of."""
        if 2 * self.budget < budget:  # the rest is no margin, which grows with the budget: something else needs that
            return NoPlanFits(budget, self.smallest + budget - self.budget, self.holds)
        return NoPlanFits(budget, -(-self.smallest * budget // self.budget), self.holds)


@dataclass(frozen=True, slots=True)
class Keep:
    """A site whose tensor stays in HBM.

    Attributes
    ----------
    enter : int
        Bytes that enter HBM when it is saved: its storage's, or 0 if an earlier site brought that.
    leave : int
        Bytes that leave HBM after it is used: its storage's at the last use, else 0.
    """

    enter: int
    leave: int


@dataclass(frozen=True, slots=True, eq=False)
class PageGroup:
    """Sites that are offloaded and prefetched together. Compared by identity, as each is looked up often.

    Attributes
    ----------
    sites : tuple of str
        Keys of the sites.
    nbytes : int
        Bytes of their storages.
    last_birth : int
        Position of the last save of any of them, which completes the group.
    first_use : int or None
        Position at which backward first asks for one of them; None if it never does.
    bring_at : int or None
        In-trigger: the position from which it may be prefetched; None as soon as there is room.
    tier : str or None
        Its tier: ``dram`` or ``nvme``; None leaves the choice to what is free.
    """

    sites: tuple[str, ...]
    nbytes: int
    last_birth: int
    first_use: int | None
    bring_at: int | None = None
    tier: str | None = None


_SAID = attrgetter(*(each.name for each in fields(PageGroup)))  # all that a group says


@dataclass(frozen=True, slots=True)
class Plan:
    """The decisions of one policy for one trace.

    Attributes
    ----------
    policy : str
        The policy.
    room : int
        Saved bytes that may lie in HBM at once: those kept, those leaving and those back.
    keep : mapping of str to Keep
        Sites that stay.
    groups : tuple of PageGroup
        Sites that move, in the order of their last saves.
    recompute : tuple of str
        Sites whose tensor is dropped and recomputed by its recipe: once, when one of its storage's sites is first asked
        for, or something else is recomputed from it. It then stays until the last of them was asked for.
    limits : mapping of str to (int, int)
        How `room` changes on the way: from this site's birth on, and from its first use on. Empty: it does not.
        Recomputed storages are subtracted already: they do not count as saved bytes in HBM.

    A site without an entry is not expected; it moves, in a group of its iteration's own.
    """

    policy: str
    room: int
    keep: Mapping[str, Keep]
    groups: tuple[PageGroup, ...]
    recompute: tuple[str, ...] = ()
    limits: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def keeps_everything(self) -> bool:
        """Return whether nothing moves, and nothing is recomputed."""
        return not (self.groups or self.recompute)

    @property
    def kept_bytes(self) -> int:
        """Return the bytes that stay in HBM."""
        return sum(keep.enter for keep in self.keep.values())

    @property
    def moved_bytes(self) -> int:
        """Return the bytes that are offloaded, and prefetched, once an iteration."""
        return sum(group.nbytes for group in self.groups)

    @property
    def stored_bytes(self) -> int:
        """Return the bytes that the groups take below HBM, in whole pages."""
        return sum(round_up(group.nbytes, PAGE) for group in self.groups)

    def is_the_same_as(self, other: Plan) -> bool:
        """Return whether both plans are equal; ``==`` is not enough, as groups are compared by identity."""
        if replace(self, groups=()) != replace(other, groups=()):
            return False
        return [*map(_SAID, self.groups)] == [*map(_SAID, other.groups)]

    def to_json(self) -> str:
        """Return one JSON object."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read what `to_json` wrote. `check_match` checks whether it is a plan for a certain trace.

        Raises
        ------
        ValueError
            If the text is no JSON, or a `BadField` if it holds what no run writes.
        """
        data = record(parse(text), "plan")
        plan = cls(
            policy=string(value_of(data, "policy"), "policy"),
            room=whole(value_of(data, "room"), "room", 0, _MOST_OF_ALL),
            keep=mapping(value_of(data, "keep"), "keep", _keep, MOST_SITES),
            groups=items(value_of(data, "groups"), "groups", _group, MOST_SITES),
            recompute=items(value_of(data, "recompute"), "recompute", string, MOST_SITES),
            limits=mapping(value_of(data, "limits"), "limits", _limit, MOST_SITES),
        )
        _check_places(plan)
        return plan


def _keep(value: object, where: str) -> Keep:
    said = record(value, where)
    no_others(said, ("enter", "leave"), where)
    return Keep(*(whole(value_of(said, name, where), f"{where}.{name}") for name in ("enter", "leave")))


def _group(value: object, where: str) -> PageGroup:
    said = record(value, where)
    no_others(said, tuple(each.name for each in fields(PageGroup)), where)
    if said.get("tier") not in (None, "dram", "nvme"):
        raise BadField(f"{where}.tier", "is neither dram, nor nvme, nor null")
    first_use, bring_at = (_position_or_none(said.get(name), f"{where}.{name}") for name in ("first_use", "bring_at"))
    return PageGroup(
        sites=items(value_of(said, "sites", where), f"{where}.sites", string, MOST_SITES),
        nbytes=whole(value_of(said, "nbytes", where), f"{where}.nbytes", 0, _MOST_OF_ALL),
        last_birth=whole(value_of(said, "last_birth", where), f"{where}.last_birth", 0, MOST_POSITIONS),
        first_use=first_use,
        bring_at=bring_at,
        tier=said.get("tier"),
    )


def _position_or_none(value: object, where: str) -> int | None:
    return None if value is None else whole(value, where, 0, MOST_POSITIONS)


def _limit(value: object, where: str) -> tuple[int, int]:
    limits = items(value, where, partial(whole, high=_MOST_OF_ALL), 2)
    if len(limits) < 2:
        raise BadField(where, "is not two numbers")
    return limits[0], limits[1]


def _check_places(plan: Plan) -> None:
    """Check that every site has one place."""
    for number, group in enumerate(plan.groups):
        if not group.sites:
            raise BadField(f"groups[{number}].sites", "is empty")
    grouped = [key for group in plan.groups for key in group.sites]
    placed = [*plan.keep, *grouped, *plan.recompute]
    if len(set(placed)) < len(placed):
        twice = next(key for key, count in Counter(placed).items() if count > 1)
        raise BadField("plan", f"has two places for {twice!r}")
    if sum(group.nbytes for group in plan.groups) > _MOST_OF_ALL:
        raise BadField("groups", "have more bytes than a run can")
