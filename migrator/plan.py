"""The plan: for each site keep, move or recompute, and which sites travel together. Plain data, `plan.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from operator import attrgetter

from torch_tiers.allocator.errors import TiersError
from torch_tiers.allocator.sizes import PAGE, format_at_least, format_size, round_up

READ_AHEAD = 8  # groups that may be on their way from disk before HBM has room for them


class NoPlanFits(TiersError):
    """No plan for the period stays within the budget.

    Attributes
    ----------
    budget : int
        What was asked for, in bytes.
    smallest : int
        The smallest budget for which there is one.
    holds : str
        What lies in HBM then where it holds most, and where that is.
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
        """Say the same of the budget that `self.budget` was a part of."""
        return NoPlanFits(budget, -(-self.smallest * budget // max(1, self.budget)), self.holds)


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
        Position of the last save of any of them, with which the group is complete.
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


_SAID = attrgetter(*(each.name for each in fields(PageGroup)))  # all that a group says


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
        Sites whose tensor is dropped and recomputed by its recipe: once, when one of its storage's sites is first
        asked for, or something else is made from it; it then stays until the last of them was asked for.
    regions : tuple of str
        Paths of the modules that are recomputed as a whole, at the first use of a site within. The sites
        within are in no other field; what a checkpoint saves of its own, its inputs, comes under the keys that
        `checkpoint_key` makes.
    limits : mapping of str to (int, int)
        How `room` changes on the way: from this site's birth on, and from its first use on. Empty: it does not.
        What is recomputed is taken off already: it does not count as saved bytes in HBM.

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
    def keeps_everything(self) -> bool:
        """Whether nothing moves, and nothing is recomputed."""
        return not (self.groups or self.recompute or self.regions)

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

    def is_the_same_as(self, other: Plan) -> bool:
        """Whether both say the same; groups are told apart by identity, and so are plans by ``==``."""
        if replace(self, groups=()) != replace(other, groups=()):
            return False
        return [*map(_SAID, self.groups)] == [*map(_SAID, other.groups)]

    def to_json(self) -> str:
        """One JSON object."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read what `to_json` wrote."""
        data = json.loads(text)
        return cls(
            policy=data["policy"],
            room=data["room"],
            keep={key: Keep(**keep) for key, keep in data["keep"].items()},
            groups=tuple(PageGroup(**group | {"sites": tuple(group["sites"])}) for group in data["groups"]),
            recompute=tuple(data["recompute"]),
            regions=tuple(data["regions"]),
            limits={key: (birth, use) for key, (birth, use) in data["limits"].items()},
        )
