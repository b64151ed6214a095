"""The ``dram`` tier: an arena of exact size in host memory, pinned where there is a GPU.

PyTorch's own pinned allocator rounds a request up to a power of two; this one rounds it up to a page. Memory
comes from the system in steps, each a mapping with its own extent map, so a block never crosses mappings.

A keeper grows the arena ahead of need, and gives back what lies idle or what others need more: the memory of a
cgroup is shared with the program and its other processes, and the kernel ends one of them when it is used up.

Locks: `_lock` guards the accounts and is held for microseconds. `_growing` is held while a step is mapped,
touched and pinned (0.1 s a GiB), so that two growers never overshoot the capacity; it is taken first.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from allocator.at_exit import close_at_exit
from allocator.extents import Extent, ExtentMap
from allocator.keeper import Keeper
from allocator.ledger import Account
from allocator.pinning import PinningRefused, map_pages, pin, touch
from allocator.room import Room, RoomWatch
from allocator.sizes import PAGE, GiB, format_size, round_up

log = logging.getLogger("tiers")


LOOK_EVERY = 0.5  # seconds between two looks of the keeper
LOOK_CLOSELY = 0.05  # the same while little is left
LITTLE = 2 * GiB  # others might take so much within `LOOK_EVERY`


@dataclass(slots=True, eq=False)
class _Mapping:
    memory: torch.Tensor
    extents: ExtentMap
    idle_since: float


@dataclass(frozen=True, slots=True, eq=False)
class DramBlock:
    """A piece of the arena, its address a multiple of `PAGE`. Its memory stays valid while its tensors live.

    Attributes
    ----------
    nbytes
        As requested.
    tensor
        Flat uint8 CPU tensor of exactly `nbytes`.
    """

    nbytes: int
    tensor: torch.Tensor = field(repr=False)  # its text would be its contents
    _mapping: _Mapping = field(repr=False)
    _extent: Extent

    @property
    def address(self) -> int:
        """Of its first byte."""
        return self.tensor.data_ptr()

    @property
    def room(self) -> int:
        """Bytes to the end of its last page."""
        return self._extent.nbytes

    @property
    def padded(self) -> torch.Tensor:
        """The same memory up to the end of its last page, so that O_DIRECT can transfer a tail rounded to 4 KiB."""
        return self._mapping.memory[self._extent.offset : self._extent.end]


class DramArena:
    """Hands out blocks of host memory up to a hard cap. Thread-safe.

    Parameters
    ----------
    capacity
        Bytes, rounded down to whole pages.
    pinned
        Pin all memory, for the current CUDA device. If the driver refuses that from the start, the arena says
        so and goes on unpinned; if it refuses a later step, the arena has reached its capacity.
    step
        Bytes to grow by at a time; a larger request grows by its own size.
    account
        What is taken from the system is claimed there; if a claim is refused, the arena has reached its
        capacity until one is granted again.
    node
        The NUMA node to take memory from while it has any, best the GPU's; None leaves it to the kernel.
    room
        Tells what the system leaves now. The arena takes no more than that, and what it has idle goes back when
        that is less than nothing.
    idle_after
        Seconds after which a step that lies idle goes back to the system; None is never.
    """

    def __init__(
        self,
        capacity: int,
        *,
        pinned: bool,
        step: int = GiB,
        account: Account | None = None,
        node: int | None = None,
        room: Callable[[], Room] | None = None,
        idle_after: float | None = None,
    ) -> None:
        if capacity < 0 or step <= 0:
            raise ValueError(f"an arena needs capacity >= 0 and step > 0, not {capacity} and {step}")
        self._limit = capacity - capacity % PAGE
        self._step = round_up(step, PAGE)
        self._device = torch.cuda.current_device() if pinned else None
        self._account = account
        self._refused = False  # the last claim
        self._node = node
        self._room = RoomWatch(room)
        self._idle_after = math.inf if idle_after is None else idle_after
        self._lock = threading.Lock()
        self._growing = threading.Lock()
        self._mappings: list[_Mapping] = []
        self._used = 0
        self._peak = 0
        self._grown = 0
        self._closed = False
        self._largest = 0  # request
        self._goal = 0
        self._resting = False  # gave memory back: it grows on demand until it is asked for more than it has
        self._keeper = Keeper(self._tend)
        close_at_exit(self)

    @property
    def capacity(self) -> int:
        """The most the arena can hold, in bytes; what it has while it can get no more."""
        more = min(0 if self._refused else self._limit - self._grown, self._room.seen)
        return max(self._grown + more - more % PAGE, 0)

    def lacks_room(self, nbytes: int) -> bool:
        """Whether it could grow by `nbytes` if others did not use that memory now."""
        nbytes = round_up(nbytes, PAGE)
        return not self._closed and self._limit - self._grown >= nbytes > self._room.seen

    @property
    def used(self) -> int:
        """Bytes in blocks, in whole pages."""
        return self._used

    @property
    def peak(self) -> int:
        """The highest that `used` has been."""
        return self._peak

    @property
    def grown(self) -> int:
        """Bytes taken from the system so far."""
        return self._grown

    @property
    def pinned(self) -> bool:
        """Whether blocks are pinned; False after the driver refused."""
        return self._device is not None

    def allocate(self, nbytes: int, *, in_need: bool = False) -> DramBlock | None:
        """Take a block of `nbytes`, growing if need be, or return None if the capacity is reached.

        Parameters
        ----------
        in_need
            There is no other way: take it of what the arena has even if others need that more.
        """
        self._largest = max(self._largest, nbytes)
        block = self._take(nbytes, in_need)
        if block is not None:
            return block
        with self._growing:
            least = round_up(nbytes, PAGE)
            # Asked again first: another thread may have grown while this one waited.
            while (block := self._take(nbytes, in_need)) is None:
                if not (self._grow(least) or self._drop_scattered(least)):
                    return None
        self._resting = False
        if self._goal or self._room.watches or self._idle_after < math.inf:
            self._keeper.wake()
        return block

    def free(self, block: DramBlock) -> None:
        """Give `block` back.

        Raises
        ------
        ValueError
            If it was freed before.
        """
        with self._lock:
            block._mapping.extents.free(block._extent)
            self._used -= block._extent.nbytes
            if not block._mapping.extents.used:
                block._mapping.idle_since = time.monotonic()
                if self._room.seen < 0:
                    self._keeper.wake()

    def reserve(self, nbytes: int) -> None:
        """Grow to `nbytes` (or the capacity) in the background, so that `allocate` need not.

        That is the goal until the next call, also after memory was given back and is asked for again.
        """
        if not self._closed:
            self._goal, self._resting = nbytes, False
            self._keeper.wake()

    def close(self) -> None:
        """Return everything to the system; blocks that live on keep their memory. Idempotent.

        `allocate` returns None from now on.
        """
        self._closed = True  # seen by the keeper after the step it is at
        self._keeper.join()
        with self._growing, self._lock:
            self._mappings.clear()
            self._release(self._grown)
            self._grown = 0

    def _take(self, nbytes: int, in_need: bool) -> DramBlock | None:
        with self._lock:
            # What others need is not used again, or its step would never lie idle and go back to them.
            used = self._used + round_up(nbytes, PAGE)
            if not in_need and self._room.seen < 0 and used > max(self.capacity, 2 * self._largest):
                return None
            for mapping in self._mappings:
                extent = mapping.extents.allocate(nbytes)
                if extent is not None:
                    self._used += extent.nbytes
                    self._peak = max(self._peak, self._used)
                    tensor = mapping.memory.narrow(0, extent.offset, nbytes)
                    return DramBlock(nbytes, tensor, mapping, extent)
        return None

    def _tend(self) -> float | None:
        """What the keeper does; the seconds until it looks again."""
        # An interpreter that is about to exit must not be kept pinning.
        while not (self._closed or self._resting) and threading.main_thread().is_alive():
            with self._growing:
                # No smaller than what was asked for: a mapping that holds no group takes the room of one that does.
                least = max(PAGE, round_up(self._largest, PAGE))
                if self._grown >= min(self._goal, self._limit) or not self._grow(least):
                    break
        with self._growing:
            left = self._room.left()  # a look at the system takes longer than anybody may wait for the lock
            with self._lock:
                surplus = self._surplus(left)
                self._resting |= self._drop(surplus) > 0
        del surplus  # and with it the memory, but not under the locks: to unpin it takes a while
        if self._closed:
            return None
        return LOOK_CLOSELY if self._grown and self._room.seen < LITTLE else LOOK_EVERY

    def _surplus(self, left: int) -> list[_Mapping]:
        """Mappings that lie idle for too long, and idle ones that others need more; `left` is what these leave."""
        surplus = self._idle(time.monotonic() - self._idle_after)
        left += _bytes_of(surplus)
        stays = self._grown - _bytes_of(surplus)
        for mapping in self._idle():
            # What lies on disk comes back through the arena, so it keeps a little, whatever the others need.
            if left < 0 and mapping not in surplus and stays - mapping.extents.capacity >= 2 * self._largest:
                surplus.append(mapping)
                left += mapping.extents.capacity
                stays -= mapping.extents.capacity
        return surplus

    def _grow(self, least: int) -> bool:
        """Add a mapping of at least `least` bytes; the caller holds `_growing`. False if that cannot be."""
        room = self._limit - self._grown
        if self._closed or room < least:
            return False
        nbytes = min(max(self._step, least), room, self._room.share(least))
        if not nbytes:
            self._room.say_once("dram", self._grown, self._limit)
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
                format_size(self._grown),
                format_size(self._limit),
                refusal,
            )
            self._limit = self._grown
            return False
        with self._lock:
            self._mappings.append(_Mapping(memory, ExtentMap(nbytes, PAGE), time.monotonic()))
            self._has_grown(nbytes)
        return True

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
                if self._grown:
                    raise
                text = "dram goes on unpinned, so copies are several times slower: %s; to pin less, lower TIERS_DRAM"
                log.warning(text, refusal)
                self._device = None
        return torch.frombuffer(pages, dtype=torch.uint8)

    def _drop_scattered(self, least: int) -> bool:
        """Drop idle mappings if that makes room for `least` in one piece."""
        with self._lock:
            idle = self._idle()
            room = self.capacity - self._grown + _bytes_of(idle)
            return least <= room and self._drop(idle) > 0

    def _idle(self, since: float = math.inf) -> list[_Mapping]:
        """Mappings without a block, idle since that time at the latest; the newest first."""
        return [m for m in reversed(self._mappings) if not m.extents.used and m.idle_since <= since]

    def _drop(self, mappings: list[_Mapping]) -> int:
        """Return them to the system; returns the bytes given back."""
        nbytes = _bytes_of(mappings)
        self._mappings = [mapping for mapping in self._mappings if mapping not in mappings]
        self._has_grown(-nbytes)
        self._release(nbytes)
        return nbytes

    def _has_grown(self, nbytes: int) -> None:
        self._grown += nbytes
        self._room.taken(nbytes)

    def _release(self, nbytes: int) -> None:
        if self._account is not None and nbytes:
            self._account.release(nbytes)


def _bytes_of(mappings: list[_Mapping]) -> int:
    return sum(mapping.extents.capacity for mapping in mappings)
