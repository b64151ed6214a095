"""Guards of host memory that was freed while a copy on a lane still touches it.

The memory is held until the copy is over, as the arena may return idle memory to the system at any time.
"""

from __future__ import annotations

from torch import Tensor

from torch_tiers.allocator.host.dram import DramBlock
from torch_tiers.migrator.streams import Event

GUARDS = 64  # to keep, at least, before those are looked for that may go: each look asks the device


class Guards:
    """Knows which copies must be over before freed memory is written again. Not thread-safe."""

    def __init__(self) -> None:
        self._kept: list[tuple[int, int, Event, Tensor]] = []
        self._look_at = GUARDS  # twice as many as were left by the last look, or each block would ask for all

    def add(self, block: DramBlock, event: Event) -> None:
        """Guard `block`, which is freed and may be touched until `event`."""
        while self._kept and self._kept[0][2].query():  # mostly they pass in this order
            self._kept.pop(0)
        self._kept.append((block.address, block.address + block.room, event, block.tensor))

    def over(self, block: DramBlock) -> tuple[Event, ...]:
        """Return the events that must be passed before anything is written into `block`."""
        if len(self._kept) >= self._look_at:
            self._kept = [guard for guard in self._kept if not guard[2].query()]
            self._look_at = max(GUARDS, 2 * len(self._kept))
        if not self._kept:
            return ()
        start = block.address
        end = start + block.room
        return tuple(event for low, high, event, _ in self._kept if low < end and start < high and not event.query())
