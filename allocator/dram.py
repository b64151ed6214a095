"""The ``dram`` tier: an arena of exact size in host memory, pinned where there is a GPU.

PyTorch's own pinned allocator rounds a request up to a power of two; this one rounds it up to a page. Memory
comes from the system in steps, each a mapping with its own extent map, so a block never crosses mappings.

Locks: `_lock` guards the accounts and is held for microseconds. `_growing` is held while a step is mapped,
touched and pinned (0.1 s a GiB), so that two growers never overshoot the capacity; it is taken first.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field

import torch

from allocator.extents import Extent, ExtentMap
from allocator.ledger import Account
from allocator.pinning import PinningRefused, map_pages, pin, touch
from allocator.sizes import PAGE, GiB, format_size, round_up

log = logging.getLogger("tiers")


@dataclass(frozen=True, slots=True, eq=False)
class _Mapping:
    memory: torch.Tensor
    extents: ExtentMap


@dataclass(frozen=True, slots=True, eq=False)
class DramBlock:
    """A piece of the arena, its address a multiple of `PAGE`. Its memory stays valid while its tensors live.

    Attributes
    ----------
    nbytes
        As requested.
    tensor
        Flat uint8 CPU tensor of exactly `nbytes`.
    padded
        The same memory up to the end of its last page, so that O_DIRECT can transfer a tail rounded to 4 KiB.
    """

    nbytes: int
    tensor: torch.Tensor = field(repr=False)  # its text would be its contents
    padded: torch.Tensor = field(repr=False)
    _mapping: _Mapping = field(repr=False)
    _extent: Extent


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
    """

    def __init__(self, capacity: int, *, pinned: bool, step: int = GiB, account: Account | None = None) -> None:
        if capacity < 0 or step <= 0:
            raise ValueError(f"an arena needs capacity >= 0 and step > 0, not {capacity} and {step}")
        self._limit = capacity - capacity % PAGE
        self._step = round_up(step, PAGE)
        self._device = torch.cuda.current_device() if pinned else None
        self._account = account
        self._refused = False  # the last claim
        self._lock = threading.Lock()
        self._growing = threading.Lock()
        self._mappings: list[_Mapping] = []
        self._used = 0
        self._peak = 0
        self._grown = 0
        self._closed = False
        self._reserver: threading.Thread | None = None
        self._goal = 0

    @property
    def capacity(self) -> int:
        """The most the arena can hold, in bytes; what it has while it can get no more."""
        return self._grown if self._refused else self._limit

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

    def allocate(self, nbytes: int) -> DramBlock | None:
        """Take a block of `nbytes`, growing if need be, or return None if the capacity is reached."""
        block = self._take(nbytes)
        if block is not None:
            return block
        with self._growing:
            least = round_up(nbytes, PAGE)
            # Asked again first: another thread may have grown while this one waited.
            while (block := self._take(nbytes)) is None:
                if not (self._grow(least) or self._drop_scattered(least)):
                    return None
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

    def reserve(self, nbytes: int) -> None:
        """Grow to `nbytes` (or the capacity) in the background, so that `allocate` need not.

        A call while an earlier one is at work changes its goal.
        """
        with self._lock:
            self._goal = nbytes
            if self._reserver is not None and self._reserver.is_alive():
                return
            self._reserver = threading.Thread(target=self._grow_to_goal, name="tiers-reserve")
            self._reserver.start()

    def trim(self) -> int:
        """Return mappings without a block to the system; returns the bytes given back."""
        with self._growing, self._lock:
            return self._drop_idle()

    def close(self) -> None:
        """Return everything to the system; blocks that live on keep their memory. Idempotent.

        `allocate` returns None from now on.
        """
        self._closed = True  # seen by the reserving thread after the step it is at
        if self._reserver is not None:
            self._reserver.join()
        with self._growing, self._lock:
            self._mappings.clear()
            self._release(self._grown)
            self._grown = 0

    def _take(self, nbytes: int) -> DramBlock | None:
        with self._lock:
            for mapping in self._mappings:
                extent = mapping.extents.allocate(nbytes)
                if extent is not None:
                    self._used += extent.nbytes
                    self._peak = max(self._peak, self._used)
                    padded = mapping.memory[extent.offset : extent.end]
                    return DramBlock(nbytes, padded[:nbytes], padded, mapping, extent)
        return None

    def _grow_to_goal(self) -> None:
        # An interpreter that is about to exit waits for this thread: it must not pin another 100 GiB first.
        while not self._closed and threading.main_thread().is_alive():
            with self._growing:
                if self._grown >= min(self._goal, self._limit) or not self._grow(PAGE):
                    return

    def _grow(self, least: int) -> bool:
        """Add a mapping of at least `least` bytes; the caller holds `_growing`. False if that cannot be."""
        room = self._limit - self._grown
        if self._closed or room < least:
            return False
        nbytes = min(max(self._step, least), room)
        if self._account is not None:
            nbytes = self._account.claim(nbytes, least)
            self._refused = not nbytes
            if self._refused:
                return False
        try:
            memory = self._obtain(nbytes)
        except (OSError, PinningRefused) as refusal:
            log.warning(
                "dram stays at %s of %s, the system gives no more: %s",
                format_size(self._grown),
                format_size(self._limit),
                refusal,
            )
            self._limit = self._grown
            return False
        with self._lock:
            self._mappings.append(_Mapping(memory, ExtentMap(nbytes, PAGE)))
            self._grown += nbytes
        return True

    def _obtain(self, nbytes: int) -> torch.Tensor:
        try:
            return self._map(nbytes)
        except BaseException:  # also Ctrl-C: what nobody has must not stay claimed
            self._release(nbytes)
            raise

    def _map(self, nbytes: int) -> torch.Tensor:
        pages = map_pages(nbytes)
        touch(pages)  # pinning resident pages is faster, and an unpinned arena must not fault on the hot path
        if self._device is not None:
            try:
                pin(pages, self._device)
            except PinningRefused as refusal:
                if self._grown:
                    raise
                log.warning("dram goes on unpinned, so copies are several times slower: %s", refusal)
                self._device = None
        return torch.frombuffer(pages, dtype=torch.uint8)

    def _drop_scattered(self, least: int) -> bool:
        """Drop idle mappings if that makes room for `least` in one piece."""
        with self._lock:
            return least <= self.capacity - self._grown + self._idle() and self._drop_idle() > 0

    def _idle(self) -> int:
        return sum(mapping.extents.capacity for mapping in self._mappings if not mapping.extents.used)

    def _drop_idle(self) -> int:
        idle = self._idle()
        self._mappings = [mapping for mapping in self._mappings if mapping.extents.used]
        self._grown -= idle
        self._release(idle)
        return idle

    def _release(self, nbytes: int) -> None:
        if self._account is not None and nbytes:
            self._account.release(nbytes)
