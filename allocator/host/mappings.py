"""The memory of an arena: mapped from the system a step at a time, touched, pinned, and released when it lies idle.

Locks, which the arena takes: `lock` guards the accounts and is held for microseconds. `growing` is held while a step
is mapped, touched and pinned (0.1 s a GiB), so that two growers never overshoot the limit; it is taken first.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from torch_tiers.allocator.extents import ExtentMap
from torch_tiers.allocator.holders import Holder
from torch_tiers.allocator.host.ledger import Account
from torch_tiers.allocator.host.pinning import PinningRefused, map_pages, pin, touch
from torch_tiers.allocator.host.room import Room, RoomWatch
from torch_tiers.allocator.sizes import PAGE, format_size, round_up

log = logging.getLogger("tiers")


AGAIN = 10.0  # seconds after which the system is asked once more for what it gave before


@dataclass(slots=True, eq=False)
class Mapping:
    """One step: its memory, which extents of it are in use, and since when none is."""

    memory: torch.Tensor
    extents: ExtentMap
    idle_since: float


class Mappings:
    """The steps of memory that an arena has taken from the system, up to a hard cap.

    See `allocator.host.dram.DramArena` for the parameters.

    Attributes
    ----------
    limit
        The hard cap, in bytes; the most that it ever had where the system gave no more.
    grown
        Bytes taken from the system so far.
    room
        How much the system has left.
    closed
        Whether the arena is closed: it takes no more.
    """

    def __init__(
        self,
        limit: int,
        step: int,
        *,
        pinned: bool,
        account: Account | None,
        node: int | None,
        room: Callable[[], Room] | None,
    ) -> None:
        self.limit = limit
        self.grown = 0
        self.room = RoomWatch(room)
        self.closed = False
        self.lock = threading.Lock()
        self.growing = threading.Lock()
        self._step = step
        self._device = torch.cuda.current_device() if pinned else None
        self._account = account
        self._refused = False  # the last claim, or what the system gave before
        self._most = 0  # that it ever had
        self._not_before = -math.inf  # the system is asked again
        self._node = node
        self._mappings: list[Mapping] = []

    def __iter__(self) -> Iterator[Mapping]:
        """Go through all of them, the oldest first; under `lock`."""
        return iter(self._mappings)

    @property
    def capacity(self) -> int:
        """The most that it can have, in bytes; what it has while it can get no more."""
        more = min(0 if self._refused else self.limit - self.grown, self.room.seen)
        return max(self.grown + more - more % PAGE, 0)

    @property
    def pinned(self) -> bool:
        """Whether they are pinned; False after the driver refused."""
        return self._device is not None

    @property
    def others(self) -> tuple[Holder, ...]:
        """Who else holds something of the tier, while that is why it can get no more."""
        return self._account.others if self._refused and self._account is not None else ()

    def lacks_room(self, nbytes: int) -> bool:
        """Whether it could grow by `nbytes` if others did not use that memory now."""
        nbytes = round_up(nbytes, PAGE)
        return not self.closed and self.limit - self.grown >= nbytes > self.room.seen

    def grow(self, least: int, wish: int = 0) -> bool:
        """Add a mapping of at least `least` bytes; under `growing`. False if that cannot be.

        The mapping has `wish` bytes if that is more than a step and there is room. No block crosses a mapping's end, so
        the larger the mappings, the less is left over at their ends.
        """
        room = self.limit - self.grown
        if self.closed or room < least or time.monotonic() < self._not_before:
            return False
        nbytes = min(max(self._step, least, wish), room, self.room.share(least))
        if not nbytes:
            self.room.say_once("dram", self.grown, self.limit)
            if self._account is not None:
                self._account.claims.no_room = self.room.reason
            return False
        if self._account is not None:
            nbytes = self._account.claim(nbytes, least)
            self._refused = not nbytes
            if self._refused:
                return False
        try:
            memory = self._obtain(nbytes)
        except (OSError, PinningRefused) as refusal:
            log.warning(
                "dram stays at %s of %s, the system gives no more: %s; TIERS_NVME takes what does not fit",
                format_size(self.grown),
                format_size(self.limit),
                refusal,
            )
            # What it gave before it may give again, once others have done with it.
            self.limit = max(self.grown, self._most)
            self._refused = self.limit > self.grown
            self._not_before = time.monotonic() + AGAIN
            return False
        self._refused = False
        with self.lock:
            self._mappings.append(Mapping(memory, ExtentMap(nbytes, PAGE), time.monotonic()))
            self._has_grown(nbytes)
        return True

    def beyond(self, nbytes: int) -> Mapping:
        """Map memory outside the cap, without a claim; it is unmapped with the last reference to it.

        Raises
        ------
        OSError
            If the system has none.
        """
        nbytes = round_up(nbytes, PAGE)
        try:
            memory = self._map(nbytes)
        except PinningRefused:
            pages = map_pages(nbytes, self._node)
            memory = torch.frombuffer(pages, dtype=torch.uint8)
        return Mapping(memory, ExtentMap(nbytes, PAGE), time.monotonic())

    def drop_scattered(self, least: int) -> bool:
        """Drop idle mappings if that makes room for `least` in one piece; under `growing`."""
        with self.lock:
            idle = self._idle()
            room = self.capacity - self.grown + _bytes_of(idle)
            if least > room or not self.drop(idle):
                return False
            self._not_before = -math.inf  # whatever was refused before: this much there is now
            return True

    def surplus(self, left: int, *, idle_after: float, keep: int) -> list[Mapping]:
        """The mappings to drop: idle for too long, or idle and needed more by others; under `lock`.

        Parameters
        ----------
        left
            Bytes that the system has left; if negative, so many are needed by others.
        idle_after
            Seconds after which an idle one is surplus in any case.
        keep
            Bytes to keep, whatever others need.
        """
        surplus = self._idle(time.monotonic() - idle_after)
        left += _bytes_of(surplus)
        stays = self.grown - _bytes_of(surplus)
        for mapping in self._idle():
            if left < 0 and mapping not in surplus and stays - mapping.extents.capacity >= keep:
                surplus.append(mapping)
                left += mapping.extents.capacity
                stays -= mapping.extents.capacity
        return surplus

    def drop(self, mappings: list[Mapping]) -> int:
        """Return `mappings` to the system, with the last reference to them; under `lock`. The bytes released."""
        nbytes = _bytes_of(mappings)
        self._mappings = [mapping for mapping in self._mappings if mapping not in mappings]
        self._has_grown(-nbytes)
        self._release(nbytes)
        return nbytes

    def clear(self) -> None:
        """Return all of them; under both locks."""
        self._mappings.clear()
        self._release(self.grown)
        self.grown = 0

    def _obtain(self, nbytes: int) -> torch.Tensor:
        try:
            return self._map(nbytes)
        except BaseException:  # also Ctrl-C: what nobody has must not stay claimed
            self._release(nbytes)
            raise

    def _map(self, nbytes: int) -> torch.Tensor:
        pages = map_pages(nbytes, self._node)
        touch(pages)  # pinning resident pages is faster, and an unpinned arena must not fault on the hot path
        if self._device is not None:
            try:
                pin(pages, self._device)
            except PinningRefused as refusal:
                if self._most:  # this machine does pin
                    raise
                text = "dram goes on unpinned, so copies are several times slower: %s; to pin less, lower TIERS_DRAM"
                log.warning(text, refusal)
                self._device = None
        return torch.frombuffer(pages, dtype=torch.uint8)

    def _idle(self, since: float = math.inf) -> list[Mapping]:
        """Mappings without a block, idle since that time at the latest; the newest first."""
        return [m for m in reversed(self._mappings) if not m.extents.used and m.idle_since <= since]

    def _has_grown(self, nbytes: int) -> None:
        self.grown += nbytes
        self._most = max(self._most, self.grown)
        self.room.taken(nbytes)

    def _release(self, nbytes: int) -> None:
        if self._account is not None and nbytes:
            self._account.release(nbytes)


def _bytes_of(mappings: list[Mapping]) -> int:
    return sum(mapping.extents.capacity for mapping in mappings)
