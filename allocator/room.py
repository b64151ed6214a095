"""What the system leaves of memory that is shared with the program and its other processes."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import NamedTuple

from allocator.sizes import PAGE, format_size

log = logging.getLogger("tiers")

FRESH = 0.1  # seconds for which a look is good
_SHARE = 8  # a step takes one part in so many of what is left: others may be taking a step at the same time


class Room(NamedTuple):
    """Bytes that the system leaves, and what limits them, for a message. Negative: so much should be given back."""

    nbytes: int
    reason: str


class RoomWatch:
    """Looks at the room, not too often. The owner locks.

    Parameters
    ----------
    look
        Tells what the system leaves now; None where nothing limits.
    """

    def __init__(self, look: Callable[[], Room] | None) -> None:
        self._look = look
        self._seen = Room(2**63, "")
        self._at = -math.inf
        self._said = False
        self.left()

    @property
    def seen(self) -> int:
        """Bytes that were left at the last look, less what was taken since."""
        return self._seen.nbytes

    @property
    def watches(self) -> bool:
        """Whether anything limits."""
        return self._look is not None

    def left(self) -> int:
        """Bytes that are left now."""
        if self._look is not None and time.monotonic() - self._at > FRESH:
            self._seen = self._look()
            self._at = time.monotonic()
        return self.seen

    def share(self, least: int) -> int:
        """Bytes that one step may take, whole pages; 0 if that is below `least`."""
        left = self.left()
        part = left // _SHARE
        return 0 if left < least else max(part - part % PAGE, least)

    def taken(self, nbytes: int) -> None:
        """Take note of what the owner took since the last look, or gave back."""
        self._seen = self._seen._replace(nbytes=self.seen - nbytes)

    def say_once(self, tier: str, has: int, limit: int) -> None:
        """Say why `tier` stays at what it has."""
        if not self._said:
            self._said = True
            reason = self._seen.reason
            log.warning("%s stays at %s of %s for now: %s", tier, format_size(has), format_size(limit), reason)
