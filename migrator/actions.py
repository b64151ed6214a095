"""What a plan says of a site, in the form in which the hooks look it up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias

from migrator.paces import Pace
from migrator.plan import PageGroup
from migrator.recompute.finder import Finder, Verified

if TYPE_CHECKING:
    from migrator.mover import Mover


@dataclass(frozen=True, slots=True)
class Stay:
    """Stay; with the bytes that enter and leave HBM by it."""

    mover: Mover
    enter: int
    leave: int
    pace: Pace | None = None
    stays: ClassVar[Literal[True]] = True


@dataclass(frozen=True, slots=True)
class Go:
    """Go, with this group."""

    mover: Mover
    group: PageGroup
    pace: Pace | None = None
    stays: ClassVar[Literal[False]] = False


@dataclass(frozen=True, slots=True)
class Recompute:
    """Drop, and recompute."""

    mover: Mover
    verified: Verified
    finder: Finder
    pace: Pace | None = None
    stays: ClassVar[Literal[False]] = False


Action: TypeAlias = Stay | Go | Recompute
