"""Stores groups below HBM: in a block of the DRAM arena, and beyond its capacity in a file extent on NVMe.

A *stored group* is the bytes of one group. It starts in a DRAM block, into which the engine copies. If DRAM runs short,
the stored group that is needed last is written to NVMe and its block is freed. It is read into a block again before it
is needed. It keeps its extent until it is dropped, so a block that was only read into can be freed at no cost.

Engines call from whatever threads the program runs in; `_lock` lets them in one at a time. A block that is freed while
a copy on a lane still touches it is *guarded*: whoever gets that memory next waits for the copy.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import wait

from torch_tiers.allocator.errors import TierFull, TierTooSmall
from torch_tiers.allocator.host.dram import DramArena, DramBlock
from torch_tiers.allocator.nvme.store import NvmeStore
from torch_tiers.allocator.sizes import PAGE
from torch_tiers.migrator.offload.disk import Disk
from torch_tiers.migrator.offload.guards import Guards
from torch_tiers.migrator.offload.stored import StoredGroup
from torch_tiers.migrator.offload.user import User
from torch_tiers.migrator.offload.wait_for_others import WaitForOthers
from torch_tiers.migrator.streams import Event
from torch_tiers.migrator.telemetry.counters import Counters

log = logging.getLogger("tiers")

ROUNDING = 16  # one part in so many: what rounding to pages and the ends of the arena's steps take


class Backing:
    """Stores groups in DRAM first and on NVMe after that.

    Parameters
    ----------
    dram : DramArena
        The arena.
    nvme : NvmeStore or None
        The store beyond it, if there is one.
    counters : Counters
        Receives disk bytes and the host's waits for the disk.
    """

    def __init__(self, dram: DramArena, nvme: NvmeStore | None, counters: Counters) -> None:
        self._dram = dram
        self._nvme = nvme
        self._disk = None if nvme is None else Disk(nvme, counters)
        self._counters = counters
        self._in_dram: dict[StoredGroup, None] = {}  # an ordered set: victims must not depend on addresses
        self._dropped: list[StoredGroup] = []
        self._guards = Guards()
        self._largest = 0
        self._reserved: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
        self._warned_of_full = False  # once for all threads, too
        self._warned_of_beyond = False
        self.at_shortage: Callable[[], None] = lambda: None  # called when that is said
        self._lock = threading.RLock()
        self._others = WaitForOthers(dram, threading.Condition(self._lock))
        self.has_disk = nvme is not None
        self.directory = None if nvme is None else nvme.directory
        self.users: set[User] = set()  # which have groups here; held, or what they have here would outlive them

    # ------------------------------------------------------------------------------------- places

    def new(self, nbytes: int, next_use: int, tier: str | None = None, *, insist: bool = False) -> StoredGroup:
        """Make a stored group with a block of its own, also if it is meant for NVMe.

        With `insist` it waits for a while if other processes use the memory: what they take for a moment is no reason
        to leave the plan. If one wait was in vain it does not wait again. Meanwhile other engines may use the backing.

        Raises
        ------
        TierFull
            If neither DRAM nor NVMe has room for it.
        """
        stored = StoredGroup(nbytes, next_use, tier=tier)
        with self._lock:
            self._largest = max(self._largest, nbytes)
            deadline = self._others.deadline() if insist else 0.0
            stored.after = self._put(stored, self._find_block(nbytes, deadline))
            try:
                while most := self._stranded():
                    if not (self._reap() or self._wait_for_disk() or self._others.wait(most, deadline)):
                        self._free_block(stored)  # which has the error not count it
                        raise self.full(nbytes)
                self._demote_ahead()
            except BaseException:  # such as the error of another group's write
                self._free_block(stored)  # of which nobody else knows
                raise
            self._counters.groups += 1
        return stored

    def filled(self, stored: StoredGroup) -> bool:
        """Take note that the copy into the block has been submitted; whether the group goes on to NVMe."""
        with self._lock:
            if stored.tier == "nvme" and self._disk is not None:
                self._disk.write(stored)
                self._reap()  # blocks of those that are written, before DRAM is full of them
            return stored.writing is not None or stored.extent is not None

    def drop(self, stored: StoredGroup) -> None:
        """Forget a stored group, also while copies or disk requests are under way."""
        with self._lock:
            self._in_dram.pop(stored, None)
            self._dropped.append(stored)
            if self._disk is not None:
                self._disk.abandon(stored)
            self._reap()

    def _find_block(self, nbytes: int, deadline: float = 0.0) -> DramBlock:
        while (block := self._dram.allocate(nbytes)) is None:
            if not (self._reap() or self._forget_copy() or self._wait_for_disk() or self._demote()):
                # Asked before as well: what others gave back in between is found by the next look.
                lacked = self._dram.lacks_room(nbytes)
                block = self._dram.allocate(nbytes, in_need=True)
                if block is not None:
                    return block
                if not self._others.wait(nbytes, deadline, lacked=lacked):
                    raise self.full(nbytes)
        return block

    def _find_block_for_what_is_needed(self, nbytes: int) -> DramBlock:
        """Return a block for a group that backward reads now; as a last resort one outside the DRAM budget."""
        try:
            return self._find_block(nbytes)
        except TierFull as full:
            block = self._dram.beyond(nbytes)
            if block is None:
                raise
            if not self._warned_of_beyond:
                self._warned_of_beyond = True
                log.warning("%s; groups that backward needs from nvme are read through memory beyond that", str(full))
            return block

    def _stranded(self) -> int:
        """Return the bytes of a group on NVMe that could find no block, or 0: a new one must not take the last."""
        most = 0 if self._disk is None else self._disk.largest  # to look at that one suffices
        if not most or (self._nvme is not None and self._nvme.capacity - self._nvme.used >= most):
            return 0  # nothing is there, or it can take what is in the way
        if any(p.extent and p.block is not None and p.block.room >= most for p in self._in_dram):
            return 0  # a block whose bytes are there as well, or will be
        block = self._dram.allocate(most, in_need=True)
        if block is None:
            return most
        self._dram.free(block)
        return 0

    def _put(self, stored: StoredGroup, block: DramBlock) -> tuple[Event, ...]:
        """Put `stored` into `block`; return the copies that must be over before the block is written."""
        stored.block = block
        self._in_dram[stored] = None
        return self._guards.over(block)

    def _free_block(self, stored: StoredGroup) -> bool:
        block = stored.block
        if block is None:
            return False
        last = stored.returned or stored.filled  # what is copied out was waited for until it had been copied in
        if last is not None and not last.query():
            self._guards.add(block, last)
        self._in_dram.pop(stored, None)
        stored.block = None
        self._dram.free(block)
        return True

    @property
    def dram_capacity(self) -> int:
        """Return the bytes that DRAM holds."""
        return self._dram.capacity

    @property
    def capacity(self) -> int:
        """Return the bytes that DRAM and NVMe hold together, as far as others leave them now."""
        return self._dram.capacity + (0 if self._nvme is None else self._nvme.capacity)

    def check(self, needed: int) -> None:
        """Raise TierTooSmall if `needed` bytes at once are more than DRAM and NVMe hold together."""
        holds = self.capacity
        if needed > holds:
            where = None if self._nvme is None else self._nvme.where
            tiers = "dram" if self._nvme is None else "dram and nvme"
            raise TierTooSmall(tiers, where, needed, 0, holds, self._dram.others)

    def say_what_stays(self, full: TierFull) -> None:
        """Warn, once, that groups stay in HBM for which the tiers below have no room."""
        if not self._warned_of_full:
            self._warned_of_full = True
            # Its text only: a handler that keeps the exception keeps its frames, and their tensors.
            log.warning("%s; tensors that it has no room for stay in hbm, beyond the budget if need be", str(full))
            self.at_shortage()

    def say_if_nothing_fits(self) -> None:
        """Warn before training if not even the smallest group would find room."""
        with self._lock:
            block = self._dram.allocate(PAGE)
            if block is None:
                self.say_what_stays(self.full(PAGE))
            else:
                self._dram.free(block)

    def reserve(self, owner: object, nbytes: int, largest: int = 0) -> None:
        """Have DRAM grow in the background to what all owners need at once, in blocks up to `largest`."""
        with self._lock:
            self._reserved[owner] = nbytes
            needed = sum(self._reserved.values())
        self._dram.reserve(needed + needed // ROUNDING, largest)

    def full(self, nbytes: int) -> TierFull:
        """Return the error that there is no room."""
        nvme, dram = self._nvme, self._dram
        if nvme is None or nbytes > dram.capacity:
            return TierFull("dram", None, nbytes, dram.used, dram.capacity, dram.others)
        return TierFull("dram and nvme", nvme.where, nbytes, dram.used + nvme.used, self.capacity, dram.others)

    # ------------------------------------------------------------------------------ DRAM to NVMe

    def _demote_ahead(self) -> None:
        """Start to write before DRAM is full, so that the next groups find room without waiting for the disk.

        This is not done if DRAM holds all that the plans keep in it at once: each group would go to disk and back for
        nothing.
        """
        if self._disk is None or 0 < sum(self._reserved.values()) <= self._dram.capacity:
            return
        reserve = min(2 * self._largest, self._dram.capacity // 4)
        leaving = sum(stored.nbytes for stored in self._in_dram if stored.writing)
        while self._dram.capacity - self._dram.used + leaving < reserve:
            stored = self._demote()
            if stored is None:
                return
            leaving += stored.nbytes

    def _demote(self) -> StoredGroup | None:
        """Start to write out the stored group that is needed last; return None if none can go."""
        movable = [p for p in self._in_dram if p.filled and not (p.writing or p.extent or p.stuck)]
        if self._disk is None or not movable:
            return None
        stored = max(movable, key=lambda p: (p.tier != "dram", p.next_use))
        return stored if self._disk.write(stored) else None

    def _reap(self) -> bool:
        """Free blocks that no disk request uses any more; return whether there was one."""
        reaped = False
        if self._disk is not None:
            for stored in [p for p in self._in_dram if p.writing and p.writing.done()]:
                reaped |= self._disk.written(stored) and self._free_block(stored)
        for stored in [p for p in self._dropped if not p.on_disk_lane()]:
            self._dropped.remove(stored)
            reaped |= self._free_block(stored)
            if self._disk is not None:
                self._disk.free(stored)
        return reaped

    def _wait_for_disk(self) -> bool:
        """Block the host until a request that holds a block is over, writes first; return whether there was one."""
        stored_groups = (*self._dropped, *self._in_dram)
        for cause, requests in (
            ("disk_write", [p.writing for p in stored_groups]),
            ("disk_read", [p.reading for p in stored_groups]),
        ):
            request = next((r for r in requests if r is not None and not r.done()), None)
            if request is not None:
                with self._counters.waiting(cause):
                    wait([request])
                self._reap()
                return True
        return False

    def _forget_copy(self) -> bool:
        """Free the block, of groups that are on NVMe as well, of the one needed last; return whether there was one."""
        copies = [p for p in self._in_dram if p.extent and not p.on_disk_lane() and not p.writing]
        if not copies:
            return False
        return self._free_block(max(copies, key=lambda p: p.next_use))

    # ------------------------------------------------------------------------------ NVMe to DRAM

    def read_ahead(self, stored: StoredGroup) -> bool:
        """Start to read a stored group if DRAM has room without pushing another out; return False if it has not."""
        with self._lock:
            self._reap()
            if stored.block is None:
                if (block := self._dram.allocate(stored.nbytes)) is None:
                    return False
                self._read_into(stored, block)
        return True

    def lend(self, stored: StoredGroup, copy: Callable[[DramBlock], Event], *, keep: bool = True) -> None:
        """Have the stored group's bytes copied out of its block; block the host while they are still on disk.

        Without `keep` the block is freed if NVMe has the bytes, too: nobody will want them soon.

        `copy` is called with the lock held: nobody may take the block away before `returned` says that it is in use.

        Raises
        ------
        StoreError
            If the disk does not return what was written.
        """
        with self._lock:
            stored.returned = copy(self._bring(stored))
            if not (keep or stored.extent is None or stored.writing):  # who notes that a write is over frees it
                self._free_block(stored)

    def take(self, stored: StoredGroup) -> DramBlock:
        """As `lend`; return the block to who changes the bytes there. It stays until `filled`."""
        with self._lock:
            block = self._bring(stored)
            if self._disk is not None:
                self._disk.discard(stored)
            stored.filled = stored.returned = stored.reading = None
            return block

    def _bring(self, stored: StoredGroup) -> DramBlock:
        self._reap()
        if stored.block is None:
            self._read_into(stored, self._find_block_for_what_is_needed(stored.nbytes))
        if (reading := stored.reading) is not None:
            if not reading.done():
                with self._counters.waiting("disk_read"):
                    reading.exception()
            if reading.exception() is not None:
                stored.reading = None
                self._free_block(stored)  # who comes next tries again
            reading.result()
        assert stored.block is not None
        return stored.block

    def _read_into(self, stored: StoredGroup, block: DramBlock) -> None:
        assert self._disk is not None
        after = self._put(stored, block)
        try:
            self._disk.read(stored, after)
        except BaseException:  # such as no thread to be had
            self._free_block(stored)  # or somebody would take it for what was to be read into it
            raise

    # ---------------------------------------------------------------------------------------- end

    def close(self) -> None:
        """Wait for the disk, and free everything that was dropped."""
        if self._disk is not None:
            self._disk.close()
        with self._lock:
            self._reap()
