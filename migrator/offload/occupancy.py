"""How much of what is saved lies in HBM, the room for it, and how far the plan's iteration has come."""

from __future__ import annotations

from typing import Protocol

from torch_tiers.migrator.planner.paces import Pace


class Occupancy(Protocol):
    """What the engine of a device counts with each tensor that is saved or asked for; it is in C++.

    The methods take no lock. If two threads count at once an update may be lost: then groups leave or come back at
    another time, until the iteration ends and bytes are counted anew.

    Attributes
    ----------
    resident : int
        Bytes in HBM.
    limit : int
        Bytes that may be there.
    position : int
        In the plan's iteration, as far as the sites that came tell; -1 before the first.
    stayed : int
        Bytes that were saved, and stay: they were only ever estimated.
    used_up : int
        Bytes that left at their last use, when somebody begins to work with them.
    due_at, due_bytes : int
        The position from which the next group may come back, and the room that it needs; at first no bound.
    """

    resident: int
    limit: int
    position: int
    stayed: int
    used_up: int
    due_at: int
    due_bytes: int

    def enter(self, nbytes: int, pace: Pace | None, /) -> bool:
        """Count bytes that enter HBM and stay, and take note that a site of the plan was saved, if one was.

        The site's limit holds from here on. Returns whether groups that are leaving are to be released for it.
        """

    def leave(self, nbytes: int, pace: Pace | None, /) -> bool:
        """Count bytes that had stayed and were used for the last time, and take note that a site was asked for.

        The site's limit and its prefetches hold from here on, if it comes in the plan's order and for the first time.
        Returns whether the next group may come back now.
        """
