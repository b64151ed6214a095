"""One directory of a store: which extents of its file are in use, how far that has grown, and how fast it is."""

from __future__ import annotations

import errno
import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from operator import attrgetter

from torch_tiers.allocator.errors import StoreError
from torch_tiers.allocator.extents import Extent, ExtentMap
from torch_tiers.allocator.host.ledger import Account
from torch_tiers.allocator.host.room import Room, RoomWatch
from torch_tiers.allocator.nvme.backend import BLOCK, Backend
from torch_tiers.allocator.sizes import format_size

log = logging.getLogger("tiers")

_FAILURES = 3
"""Writes in a row, each tried again before, after which a directory is given up."""
_ALIKE = 1.25
"""Up to this many times the fastest's seconds per byte, volumes count as equally fast: requests vary as much."""
_HUNG = 10
"""A request counts as at most this many times as long as the volume's average: one may have hung."""
_RECENT = 256
"""Requests after which earlier ones count half as much: a drive gets slower as it fills, or as it warms."""
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""What does not go by itself: the first of these is enough."""


class Volume:
    """Extents of one backend's file, which grows in steps up to a hard cap. Not thread-safe: the store locks.

    Parameters
    ----------
    backend
        The file, empty.
    limit
        Hard cap in bytes, rounded down to whole blocks.
    step
        Bytes to grow by, so that a large limit claims only the disk space that is used.
    account
        What the file grows by is claimed there; if a claim is refused, there is no room until one is granted.
    room
        Tells what the system leaves of memory, if the file lies there: it takes no more than that. None for a drive.

    Attributes
    ----------
    load
        Bytes that it was given, each counted as many times as it takes longer than on the fastest of the directories.
    to_say
        Warnings that are still to be given: `say`, without the lock, as who handles the log may ask for it.
    """

    def __init__(
        self,
        backend: Backend,
        limit: int,
        step: int,
        account: Account | None = None,
        room: Callable[[], Room] | None = None,
    ) -> None:
        self.backend = backend
        self.load = 0.0
        self._extents = ExtentMap(0, BLOCK)
        self._limit = limit - limit % BLOCK
        self._step = step - step % BLOCK
        self._account = account
        self._claimed = 0
        self._room = RoomWatch(room)
        self._refused = False  # to grow, the last time, by others who have the rest
        self._failures = 0  # writes, since the last that succeeded
        self._warned = False
        self._retired = False
        self._requests, self._bytes, self._seconds = 0, 0.0, 0.0  # of the last ones, that count less the older they are
        self.to_say: deque[str] = deque()

    def say(self) -> None:
        """Give the warnings that are due."""
        with suppress(IndexError):  # by now another thread may have given them
            while True:
                log.warning("%s", self.to_say.popleft())

    @property
    def capacity(self) -> int:
        """Bytes that it may hold: less than it was given when it can get no more or is out of rotation."""
        if self._retired:
            return self._extents.used
        return self._extents.capacity if self._refused else self._limit

    def allocate(self, nbytes: int) -> Extent | None:
        """Take `nbytes` (whole blocks), or return None if there is no room."""
        if self._retired:
            return None
        extent = self._extents.allocate(nbytes)
        if extent is None and self._grow(nbytes - self._extents.tail_free):
            extent = self._extents.allocate(nbytes)
        return extent

    def free(self, extent: Extent) -> None:
        """Free `extent`. ValueError if it is not allocated."""
        self._extents.free(extent)

    def note_request(self, nbytes: int, seconds: float) -> None:
        """Take note how long a request took, a write or a read."""
        if (usual := self.seconds_per_byte) is not None:  # it may have hung, which says little of those to come
            seconds = min(seconds, _HUNG * usual * nbytes)
        self._requests += 1
        if self._requests == _RECENT:
            self._requests, self._bytes, self._seconds = 0, self._bytes / 2, self._seconds / 2
        self._bytes += nbytes
        self._seconds += seconds

    @property
    def seconds_per_byte(self) -> float | None:
        """Seconds that a request takes for each byte, of the last ones; None if there was none."""
        return self._seconds / self._bytes if self._bytes else None

    def write_succeeded(self) -> None:
        """Forget the failures before."""
        self._failures = 0

    def write_failed(self, error: StoreError) -> None:
        """Take the directory out of rotation at the third failure in a row, or at once if the disk is full.

        What is on it can still be read, nothing new goes there.
        """
        self._failures += 1
        full = isinstance(error.__cause__, OSError) and error.__cause__.errno in _FULL
        if self._retired:
            return
        if full or self._failures >= _FAILURES:
            self._retired = True
            self.to_say.append(
                f"nvme at {self.backend.path} takes no more data: {error}; unless it is just full, look at dmesg and "
                "name another directory (TIERS_NVME_PATH)"
            )
        else:
            self._warn_once(f"{error}; nothing is lost, and it stays in use unless {_FAILURES} writes in a row fail")

    def read_differed(self, error: StoreError) -> None:
        """Warn that data was wrong when it was read, and right when it was read again."""
        self._warn_once(f"{error.reason}, and all was well when it was read again")

    def close(self) -> None:
        """Free the file's space; nothing can be allocated any more. Idempotent."""
        self._retired = True
        self.backend.close()
        self._release(self._claimed)

    def _grow(self, least: int) -> bool:
        size = self._extents.capacity
        room = self._limit - size
        if room < least:
            return False
        while True:
            more = min(max(self._step, least), room, self._room.share(least))
            self._refused = not more
            if self._refused:
                self._room.say_once(f"nvme at {self.backend.path}", size, self._limit)
                return False
            if self._account is not None:
                more = self._account.claim(more, least)
                self._claimed += more
                self._refused = not more
                if self._refused:
                    return False
            try:
                self.backend.grow(size + more)
            except OSError as refusal:
                self._release(more)
                if more > least:  # a disk that is nearly full still has room for smaller steps
                    self._step = max(more // 2 - more // 2 % BLOCK, BLOCK)
                    continue
                self.to_say.append(
                    f"nvme at {self.backend.path} stays at {format_size(size)} of {format_size(self._limit)}: "
                    f"{refusal.strerror}; make room there, or name one more directory (TIERS_NVME_PATH)"
                )
                self._limit = size
                return False
            self._extents.extend(more)
            self._room.taken(more)
            return True

    def _warn_once(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            self.to_say.append(f"nvme at {self.backend.path}: {what}; look at dmesg")

    def _release(self, nbytes: int) -> None:
        if self._account is not None and nbytes:
            self._account.release(nbytes)
            self._claimed -= nbytes


def allocate_in(volumes: Sequence[Volume], nbytes: int) -> tuple[Volume, Extent] | None:
    """Allocate `nbytes` (whole blocks) in the least loaded volume that has room; None if none has."""
    fastest = min((volume.seconds_per_byte for volume in volumes if volume.seconds_per_byte), default=None)
    full: list[Volume] = []
    for volume in sorted(volumes, key=attrgetter("load")):
        extent = volume.allocate(nbytes)
        if extent is None:
            full.append(volume)
            continue
        slower = volume.seconds_per_byte / fastest if volume.seconds_per_byte and fastest else 1.0
        volume.load += nbytes * (slower if slower > _ALIKE else 1.0)
        for other in full:  # once it has room again, it is not to be given all that it missed
            other.load = max(other.load, volume.load)
        return volume, extent
    return None
