"""How much DRAM the cores of a process may map for blocks that HBM has no room for.

It is claimed from the node when HBM is full, and released when it has not been used for a while.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from torch_tiers.allocator.host.ledger import Account
from torch_tiers.allocator.host.room import Room, RoomWatch
from torch_tiers.allocator.native import DRAM, Core, CoreError
from torch_tiers.allocator.sizes import PAGE, MiB, format_size, round_up

log = logging.getLogger("tiers")

STEP = 256 * MiB  # to claim at a time
UNUSED = 64  # periods after which what none of them used is released


class DramClaims:
    """Claims DRAM for the cores of all GPUs. For any thread.

    Parameters
    ----------
    capacity : int
        Most DRAM to map, in bytes.
    account : Account, optional
        Where DRAM is claimed before it is taken; without one, the capacity is this process's alone.
    room : callable, optional
        Tells what the system leaves now; no more is claimed than that.
    """

    def __init__(self, capacity: int, account: Account | None, room: Callable[[], Room] | None = None) -> None:
        self._capacity = capacity
        self._account = account
        self._room = RoomWatch(room)
        self._granted: dict[int, int] = {}  # by GPU: what its core may map
        self._most: dict[int, int] = {}  # by GPU: what it had mapped since `_periods` was 0
        self._periods: dict[int, int] = {}
        self._lock = threading.Lock()
        self.lender: Callable[[int], int] | None = None
        """Releases so many bytes of DRAM that lie idle elsewhere in this process, or all; returns how many."""

    def more(self, device: int, core: Core, nbytes: int, least: int = 0, *, in_need: bool = False) -> bool:
        """Let a core map `nbytes` more, or as much as there is, if that is at least `least` and a page.

        Parameters
        ----------
        in_need
            Whether the program fails unless this is granted: then DRAM that lies idle elsewhere in this process is
            released for it.

        Returns
        -------
        bool
            Whether the core may map more now.
        """
        page = core.page_bytes
        nbytes, least = (round_up(max(one, page), page) for one in (nbytes, least))
        lender = self.lender if in_need else None  # once: another thread may be ending the session
        with self._lock:
            if self._claim(device, core, nbytes, least, last=lender is None):
                return True
            if lender is None or self._left() < least:
                return False
            # The arena keeps what recorded periods needed. In those everything moves; under plans less does.
            lent = lender(max(nbytes, least) + self._room.missing)
            self._room.taken(-lent)
            return self._claim(device, core, nbytes, least, last=True)

    def release_unused(self, device: int, core: Core, nbytes: int) -> int:
        """Let a core map up to `nbytes` less, but all that it has mapped; return by how much less, in whole steps."""
        with self._lock:
            before = self.granted(device)
            if before:
                self._lower(device, core, max(core.counts().dram, before - nbytes))
            return before - self.granted(device)

    def _left(self) -> int:
        return self._capacity - sum(self._granted.values())

    def _claim(self, device: int, core: Core, nbytes: int, least: int, *, last: bool) -> bool:
        """Claim it; if that fails and this was the `last` try, log why."""
        wanted = min(max(STEP, nbytes), self._left())
        if wanted < least:
            return False
        left = self._room.left()
        wanted = min(wanted, left - left % PAGE)
        if wanted < least:
            if last:
                self._room.say_once("dram", self._capacity - self._left(), self._capacity)
                if self._account is not None:
                    self._account.claims.no_room = self._room.reason
            return False
        claimed = wanted if self._account is None else self._account.claim(wanted, least=least, say=last)
        return bool(claimed) and self._grant(device, core, claimed)

    def _grant(self, device: int, core: Core, claimed: int) -> bool:
        granted = self.granted(device) + claimed
        try:
            core.limit(DRAM, granted)
        except CoreError as error:  # some containers may not have the driver's host memory: it will not come later
            self._release(claimed)
            self._capacity = sum(self._granted.values())
            log.warning("no more dram than %s for the gpu: %s", format_size(self._capacity), error)
            return False
        self._room.taken(claimed)
        self._granted[device] = granted
        return True

    def granted(self, device: int) -> int:
        """Bytes of DRAM that a core may map."""
        return self._granted.get(device, 0)

    def period_over(self, device: int, core: Core, used: int) -> None:
        """A period has ended in which a core had `used` bytes mapped: release what was not used in `UNUSED` of them."""
        if not self.granted(device):
            return
        self._most[device] = max(used, self._most.get(device, 0))
        self._periods[device] = self._periods.get(device, 0) + 1
        if self._periods[device] < UNUSED:
            return
        self._periods[device] = 0
        self._keep(device, core, self._most.pop(device))

    def trimmed(self, device: int, core: Core) -> None:
        """A core has released to the system what it does not need: release the claim as well.

        Other processes may take that memory now, so the core has to claim it anew when it needs it again.
        """
        if self.granted(device):
            self._keep(device, core, core.counts().dram)

    def _keep(self, device: int, core: Core, nbytes: int) -> None:
        with self._lock:
            self._lower(device, core, nbytes)

    def _lower(self, device: int, core: Core, nbytes: int) -> None:
        """Let a core map so many bytes, if that is less than it may. Call with the lock."""
        keep = round_up(nbytes, STEP)
        granted = self._granted[device]  # by now: another thread may have asked for more
        if keep >= granted:
            return
        core.limit(DRAM, keep)
        # What another thread had mapped before that stays claimed, or others would take what is no longer there.
        mapped = min(granted, round_up(core.counts().dram, STEP))
        if mapped > keep:
            core.limit(DRAM, keep := mapped)
        self._granted[device] = keep
        self._room.taken(keep - granted)
        self._release(granted - keep)

    def _release(self, nbytes: int) -> None:
        if self._account is not None:
            self._account.release(nbytes)
