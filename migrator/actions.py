"""What a plan says of a site, in the form in which the hooks look it up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias

from migrator.plan import PageGroup
from migrator.remake import Verified

if TYPE_CHECKING:
    from migrator.mover import Mover


@dataclass(frozen=True, slots=True)
class Stay:
    """Stay; with the bytes that enter and leave HBM by it."""

    mover: Mover
    enter: int
    leave: int
    stays: ClassVar[Literal[True]] = True


@dataclass(frozen=True, slots=True)
class Go:
    """Go, with this group."""

    mover: Mover
    group: PageGroup
    stays: ClassVar[Literal[False]] = False


@dataclass(frozen=True, slots=True)
class Make:
    """Drop, and make again."""

    mover: Mover
    verified: Verified
    stays: ClassVar[Literal[False]] = False


Action: TypeAlias = Stay | Go | Make
