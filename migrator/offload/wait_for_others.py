"""Waits for host memory that other processes hold."""

from __future__ import annotations

import logging
import threading
import time

from torch_tiers.allocator.host.dram import LOOK_CLOSELY, DramArena

log = logging.getLogger("tiers")

LONGEST_WAIT = 10.0  # seconds for others to give memory back that a plan counts on


class WaitForOthers:
    """Waits until other processes give memory back, unless one wait was in vain.

    Parameters
    ----------
    dram : DramArena
        Lacks the memory.
    later : Condition
        Of the caller's lock. Nobody notifies it: to wait for it lets others in.
    """

    def __init__(self, dram: DramArena, later: threading.Condition) -> None:
        self._dram = dram
        self._later = later
        self._waited = False  # since the last deadline was set
        self._said = False
        self._in_vain = False  # it was: what they hold they hold for long

    def deadline(self) -> float:
        """Return until when to wait from now on; 0 for not at all."""
        self._waited = False
        return 0.0 if self._in_vain else time.monotonic() + LONGEST_WAIT

    def wait(self, nbytes: int, deadline: float, *, lacked: bool = False) -> bool:
        """Wait a moment if other processes hold the missing memory; return False if not, or after too long."""
        if not deadline or not (lacked or self._dram.lacks_room(nbytes)):
            return False
        if time.monotonic() >= deadline:
            self._in_vain |= self._waited
            return False
        self._waited = True
        if not self._said:
            self._said = True
            log.warning("dram: other processes use the host's memory; waiting up to %.0f s for room", LONGEST_WAIT)
        self._later.wait(LOOK_CLOSELY)
        return True
