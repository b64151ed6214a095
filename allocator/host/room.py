"""How much memory (or disk) the system has left that other processes take from as well."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import NamedTuple

from torch_tiers.allocator.sizes import format_size

log = logging.getLogger("tiers")

FRESH = 0.02  # seconds for which a look is good
_SHARE = 32  # a step takes one part in so many of what is left: others take theirs, and only whole steps are released


class Room(NamedTuple):
    """How many bytes the system has left.

    Attributes
    ----------
    nbytes
        Bytes; negative if that much is in use already of what is kept for others.
    reason
        What limits them, for a message.
    slack
        Bytes of what is kept for others that may be in use before anything should be released: what the program
        allocates and frees all the time is no reason to.
    """

    nbytes: int
    reason: str
    slack: int = 0


class RoomWatch:
    """Asks the system how much is left, at most every `FRESH` seconds. Not thread-safe: the owner locks.

    Parameters
    ----------
    look
        Returns what the system has left now; None where nothing limits. Until it has returned once, nothing is left:
        a tier that waits goes on with the next look, but a program that took too much would be killed by the kernel.
    """

    def __init__(self, look: Callable[[], Room] | None) -> None:
        self._look = look
        self._seen = Room(2**63 if look is None else 0, "")
        self._has_seen = False
        self._at = -math.inf
        self._said = False
        self.left()

    @property
    def seen(self) -> int:
        """Bytes that were left at the last look, less what was taken since. Negative: to be released."""
        nbytes = self._seen.nbytes
        return nbytes if nbytes >= 0 else min(nbytes + self._seen.slack, 0)

    @property
    def missing(self) -> int:
        """Bytes in use of what is kept for others, its slack included: so much has to go before anything is left."""
        return max(0, -self._seen.nbytes)

    @property
    def reason(self) -> str:
        """What limits, as far as the last look told."""
        return self._seen.reason

    @property
    def watches(self) -> bool:
        """Whether anything limits."""
        return self._look is not None

    def left(self) -> int:
        """Bytes that are left now."""
        if self._look is not None and time.monotonic() - self._at > FRESH:
            try:
                self._seen, self._has_seen = self._look(), True
            except OSError as error:  # out of file descriptors, for one: what was seen last is the best there is
                if not self._has_seen:
                    self._seen = self._seen._replace(reason=f"what the system leaves cannot be read: {error}")
            self._at = time.monotonic()
        return self.seen

    def share(self, least: int) -> int:
        """Bytes that one step may take, a multiple of `least`; 0 if not even that is left."""
        left = self.left()
        part = left // _SHARE
        return 0 if left < least else max(part - part % least, least)

    def taken(self, nbytes: int) -> None:
        """Count `nbytes` that the owner took since the last look; negative: released."""
        self._seen = self._seen._replace(nbytes=self._seen.nbytes - nbytes)

    def say_once(self, tier: str, has: int, limit: int) -> None:
        """Log, once, why `tier` stays at what it has."""
        if not self._said:
            self._said = True
            reason = self._seen.reason
            log.warning("%s stays at %s of %s for now: %s", tier, format_size(has), format_size(limit), reason)
