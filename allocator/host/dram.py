"""The ``dram`` tier: an arena of exact size in host memory, pinned where there is a GPU.

PyTorch's own pinned allocator rounds a request up to a power of two; this one rounds it up to a page. Memory
comes from the system in steps, each a mapping with its own extent map (`mappings`), so a block never crosses them.

A background thread (`Keeper`) grows the arena ahead of need, and releases to the system what lies idle or what others
need more: a cgroup's memory is shared by all processes in it, and the kernel kills one of them when it is used up.

Locks: those of the mappings; `lock` also guards what is used.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from torch_tiers.allocator.at_exit import close_at_exit
from torch_tiers.allocator.extents import Extent
from torch_tiers.allocator.holders import Holder
from torch_tiers.allocator.host.keeper import Keeper
from torch_tiers.allocator.host.ledger import Account
from torch_tiers.allocator.host.mappings import Mapping, Mappings
from torch_tiers.allocator.host.room import Room
from torch_tiers.allocator.sizes import PAGE, GiB, round_up

LOOK_EVERY = 0.5  # seconds between two looks of the keeper
LOOK_CLOSELY = 0.05  # the same while little is left
PATIENCE = 1.0  # seconds that `release_idle` waits for a thread that grows the arena
AT_ONCE = 16  # blocks of the largest size in a mapping that is made ahead: as much of one may be left over at its end
LITTLE = 2 * GiB  # others might take so much within `LOOK_EVERY`


@dataclass(frozen=True, slots=True, eq=False)
class DramBlock:
    """A piece of the arena. Its address is a multiple of `PAGE`; its memory stays valid while its tensors live.

    Attributes
    ----------
    nbytes
        As requested.
    tensor
        Flat uint8 CPU tensor of exactly `nbytes`.
    """

    nbytes: int
    tensor: torch.Tensor = field(repr=False)  # its text would be its contents
    _mapping: Mapping = field(repr=False)
    _extent: Extent

    @property
    def address(self) -> int:
        """Address of its first byte."""
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
        Tells what the system leaves now. The arena takes no more than that, and when it is below 0 the arena
        releases what it has idle.
    idle_after
        Seconds after which a step that lies idle is released to the system; None is never.
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
        limit, step = capacity - capacity % PAGE, round_up(step, PAGE)
        self._mappings = Mappings(limit, step, pinned=pinned, account=account, node=node, room=room)
        self._idle_after = math.inf if idle_after is None else idle_after
        self._used = 0
        self._peak = 0
        self._largest = 0  # request
        self._goal = 0
        self._resting = False  # it has released memory: it grows on demand until it is asked for more than it has
        self._keeper = Keeper(self._tend)
        close_at_exit(self)

    @property
    def capacity(self) -> int:
        """The most the arena can hold, in bytes; what it has while it can get no more."""
        return self._mappings.capacity

    @property
    def others(self) -> tuple[Holder, ...]:
        """The other processes that hold DRAM of the node, while that is why the arena cannot grow."""
        return self._mappings.others

    def lacks_room(self, nbytes: int) -> bool:
        """Whether it could grow by `nbytes` if others did not use that memory now."""
        return self._mappings.lacks_room(nbytes)

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
        return self._mappings.grown

    @property
    def pinned(self) -> bool:
        """Whether blocks are pinned; False after the driver refused."""
        return self._mappings.pinned

    def allocate(self, nbytes: int, *, in_need: bool = False) -> DramBlock | None:
        """Take a block of `nbytes`, growing the arena if need be; None if the capacity is reached.

        Parameters
        ----------
        in_need
            There is no other way: take it from what the arena has, even if others need that more.
        """
        self._largest = max(self._largest, nbytes)
        block = self._take(nbytes, in_need)
        if block is not None:
            return block
        with self._mappings.growing:
            least = round_up(nbytes, PAGE)
            # Asked again first: another thread may have grown while this one waited.
            while (block := self._take(nbytes, in_need)) is None:
                if not (self._mappings.grow(least) or self._mappings.drop_scattered(least)):
                    return None
        self._resting = False
        if self._goal or self._mappings.room.watches or self._idle_after < math.inf:
            self._keeper.wake()
        return block

    def beyond(self, nbytes: int) -> DramBlock | None:
        """Take a block of `nbytes` outside the capacity, for what is lost otherwise; None if the system has none."""
        if self._mappings.closed:
            return None
        try:
            mapping = self._mappings.beyond(nbytes)
        except OSError:
            return None
        with self._mappings.lock:
            return self._cut(mapping, nbytes)

    def free(self, block: DramBlock) -> None:
        """Free `block`.

        Raises
        ------
        ValueError
            If it was freed before.
        """
        with self._mappings.lock:
            block._mapping.extents.free(block._extent)
            self._used -= block._extent.nbytes
            if not block._mapping.extents.used:
                block._mapping.idle_since = time.monotonic()
                if self._mappings.room.seen < 0:
                    self._keeper.wake()

    def reserve(self, nbytes: int, largest: int = 0) -> None:
        """Grow to `nbytes` (or the capacity) in the background, so that `allocate` of blocks up to `largest` need not.

        That is the goal until the next call, also after memory was released and is asked for again.
        """
        if not self._mappings.closed:
            self._goal, self._resting = nbytes, False
            self._largest = max(self._largest, largest)
            self._keeper.wake()

    def release_idle(self, nbytes: int) -> int:
        """Release `nbytes` of what lies idle to the system, in whole steps, for somebody who needs it more.

        If less lies idle, all of it is released.

        What was last reserved stays, as plans need it again. Memory is released at once, or after the last copy that
        still reads it. From then on the arena grows on demand only, until it is asked for more than it has.

        Returns
        -------
        int
            Bytes released; 0 also if another thread is growing the arena and takes too long.
        """
        if not self._mappings.growing.acquire(timeout=PATIENCE):
            return 0
        try:
            with self._mappings.lock:
                keep = max(self._goal, 2 * self._largest)
                idle = self._mappings.surplus(-nbytes, idle_after=math.inf, keep=keep)
                released = self._mappings.drop(idle)
                self._resting |= released > 0
        finally:
            self._mappings.growing.release()
        return released

    def close(self) -> None:
        """Return everything to the system; blocks that live on keep their memory. Idempotent.

        `allocate` returns None from now on.
        """
        self._mappings.closed = True  # seen by the keeper after the step it is at
        self._keeper.join()
        with self._mappings.growing, self._mappings.lock:
            self._mappings.clear()

    def _take(self, nbytes: int, in_need: bool) -> DramBlock | None:
        with self._mappings.lock:
            # What others need is not used again, or its step would never lie idle and be released to them.
            used = self._used + round_up(nbytes, PAGE)
            if not in_need and self._mappings.room.seen < 0 and used > max(self.capacity, 2 * self._largest):
                return None
            return next((block for mapping in self._mappings if (block := self._cut(mapping, nbytes))), None)

    def _cut(self, mapping: Mapping, nbytes: int) -> DramBlock | None:
        extent = mapping.extents.allocate(nbytes)
        if extent is None:
            return None
        self._used += extent.nbytes
        self._peak = max(self._peak, self._used)
        return DramBlock(nbytes, mapping.memory.narrow(0, extent.offset, nbytes), mapping, extent)

    def _tend(self) -> float | None:
        """One round of the keeper: grow towards the goal, release what is idle; the seconds until the next round."""
        # An interpreter that is about to exit must not be kept pinning.
        while not (self._mappings.closed or self._resting) and threading.main_thread().is_alive():
            with self._mappings.growing:
                # No smaller than what was asked for: a mapping that holds no group takes the room of one that does.
                least = max(PAGE, round_up(self._largest, PAGE))
                lacks = min(self._goal, self._mappings.limit) - self._mappings.grown
                # By now it may have released something, which is not to be taken again.
                if lacks <= 0 or self._resting or not self._mappings.grow(least, min(lacks, AT_ONCE * least)):
                    break
        with self._mappings.growing:
            left = self._mappings.room.left()  # a look at the system takes longer than anybody may wait for the lock
            with self._mappings.lock:
                # What lies on disk comes back through the arena, so it keeps a little, whatever the others need.
                surplus = self._mappings.surplus(left, idle_after=self._idle_after, keep=2 * self._largest)
                self._resting |= self._mappings.drop(surplus) > 0
        del surplus  # and with it the memory, but not under the locks: to unpin it takes a while
        if self._mappings.closed:
            return None
        return LOOK_CLOSELY if self._mappings.grown and self._mappings.room.seen < LITTLE else LOOK_EVERY
