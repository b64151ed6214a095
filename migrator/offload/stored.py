"""A stored group: the bytes of one group below HBM."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from torch_tiers.allocator.host.dram import DramBlock
from torch_tiers.allocator.nvme.extent import NvmeExtent
from torch_tiers.migrator.streams import Event


@dataclass(eq=False, slots=True)
class StoredGroup:
    """The bytes of one group below HBM.

    Attributes
    ----------
    nbytes : int
        Size.
    next_use : int
        When it is needed, in the group order's own measure; only comparisons matter.
    block : DramBlock or None
        Where it lies in DRAM.
    after : sequence of Event
        To be passed before anything is written into `block`.
    filled, returned : Event or None
        The last copy into the block, and the last out of it; set by the engine.
    """

    nbytes: int
    next_use: int
    block: DramBlock | None = None
    after: Sequence[Event] = ()
    filled: Event | None = None
    returned: Event | None = None
    extent: NvmeExtent | None = None
    writing: Future[None] | None = None
    reading: Future[None] | None = None
    reserved: NvmeExtent | None = None  # for the next write, as what lies there is out of date
    stuck: bool = False  # a write of it failed: it stays in DRAM
    tier: str | None = None  # where the plan wants it, if it does not leave that to what is free

    def at_hand(self) -> bool:
        """Whether nobody has to wait for the disk to have the bytes in the block."""
        return self.block is not None and (self.reading is None or self.reading.done())

    def on_disk_lane(self) -> bool:
        """Whether a disk request still uses its block."""
        return any(request is not None and not request.done() for request in (self.writing, self.reading))
