"""Memory at the near end of a disk path: in DRAM, in HBM, or in HBM behind a bounce buffer in DRAM."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import Protocol, TypeAlias

import torch

from torch_tiers.allocator.host.dram import DramBlock
from torch_tiers.allocator.nvme.backend import BLOCK
from torch_tiers.allocator.nvme.extent import NvmeExtent
from torch_tiers.allocator.nvme.store import NvmeStore
from torch_tiers.migrator.streams import Event
from torch_tiers.migrator.streams.pieces import Piece, whole
from torch_tiers.probe.affinity import Node
from torch_tiers.probe.gpu import RuntimeLane
from torch_tiers.probe.host import HostMemory
from torch_tiers.probe.measure import window

Slice: TypeAlias = tuple[int, int, int]
"""The index of a part, and from which byte of it how many."""


class Buffer(Protocol):
    """Memory for the copies of one size, and how a store gets at it."""

    memory: torch.Tensor
    """All of it, one copy after the other."""

    def take(self, size: int) -> None:
        """Make room. Waived or TierFull if there is none."""

    def give(self) -> None:
        """Give it back; nothing is in flight by then."""

    def clear(self) -> None:
        """Zero it and all that is behind it, so that what is found there later came from the disk."""

    def write(self, store: NvmeStore, extents: Sequence[NvmeExtent]) -> None:
        """Write copy by copy to `extents`, all queued together."""

    def read(self, store: NvmeStore, extents: Sequence[NvmeExtent]) -> None:
        """Read `extents` in the same way."""


class DramBuffer:
    """Blocks of the arena, as page groups that go to disk are."""

    def __init__(self, memory: HostMemory, node: Node) -> None:
        self.memory = _NOTHING
        self.parts: Sequence[torch.Tensor] = ()
        self._memory = memory
        self._node = node
        self._block: DramBlock | None = None

    def take(self, size: int) -> None:  # noqa: D102
        self._block = self._memory.take(self._node, window(size))
        self.memory = self._block.tensor
        self.parts = self.memory.split(size)

    def give(self) -> None:  # noqa: D102
        self.memory, self.parts = _NOTHING, ()
        if self._block is not None:
            self._memory.give(self._node, self._block)
            self._block = None

    def clear(self) -> None:  # noqa: D102
        self.memory.zero_()

    def write(self, store: NvmeStore, extents: Sequence[NvmeExtent]) -> None:  # noqa: D102
        _write(store, extents, self.parts)

    def read(self, store: NvmeStore, extents: Sequence[NvmeExtent]) -> None:  # noqa: D102
        _read(store, extents, self.parts)


class HbmBuffer:
    """GPU memory that the store's backend transfers itself."""

    def __init__(self, index: int) -> None:
        self.memory = _NOTHING
        self._device = torch.device("cuda", index)
        self._parts: Sequence[torch.Tensor] = ()

    def take(self, size: int) -> None:  # noqa: D102
        # torch aligns to 512 bytes, a store asks for whole blocks.
        room = torch.empty(window(size) + BLOCK, dtype=torch.uint8, device=self._device)
        start = -room.data_ptr() % BLOCK
        self.memory = room[start : start + window(size)]
        self._parts = self.memory.split(size)

    def give(self) -> None:  # noqa: D102
        self.memory, self._parts = _NOTHING, ()

    def clear(self) -> None:  # noqa: D102
        self.memory.zero_()

    def write(self, store: NvmeStore, extents: Sequence[NvmeExtent]) -> None:  # noqa: D102
        _write(store, extents, self._parts)

    def read(self, store: NvmeStore, extents: Sequence[NvmeExtent]) -> None:  # noqa: D102
        _read(store, extents, self._parts)


class BouncedBuffer:
    """GPU memory behind a block of the arena, as the runtime goes where GPUDirect Storage is missing.

    It goes in slices, so that one is on the link while the next is on the drive, also within a copy.
    """

    def __init__(self, index: int, bounce: DramBuffer) -> None:
        self.memory = _NOTHING
        self._device = torch.device("cuda", index)
        self._bounce = bounce
        self._lanes: tuple[RuntimeLane, RuntimeLane] | None = None
        self._parts: Sequence[torch.Tensor] = ()

    def take(self, size: int) -> None:  # noqa: D102
        self._bounce.take(size)
        self.memory = torch.empty(window(size), dtype=torch.uint8, device=self._device)
        self._parts = self.memory.split(size)
        self._lanes = RuntimeLane(self._device, "d2h"), RuntimeLane(self._device, "h2d")

    def give(self) -> None:  # noqa: D102
        for lane in self._lanes or ():
            lane.close()
        self._lanes = None
        self.memory, self._parts = _NOTHING, ()
        self._bounce.give()

    def clear(self) -> None:  # noqa: D102
        self.memory.zero_()
        self._bounce.clear()

    def write(self, store: NvmeStore, extents: Sequence[NvmeExtent]) -> None:  # noqa: D102
        assert self._lanes is not None
        d2h, _ = self._lanes
        arrived = [d2h.copy([whole(*pair)]) for pair in zip(self._bounce.parts, self._parts, strict=True)]
        writes = []
        for event, extent, part in zip(arrived, extents, self._bounce.parts, strict=True):
            event.synchronize()
            writes.append(store.write(extent, part))
        _finish(writes)

    def read(self, store: NvmeStore, extents: Sequence[NvmeExtent]) -> None:  # noqa: D102
        assert self._lanes is not None
        _, h2d = self._lanes
        pairs = [whole(*pair) for pair in zip(self._parts, self._bounce.parts, strict=True)]
        last: Event | None = None
        for slices in read_in_slices(store, extents, self._bounce.parts):
            last = h2d.copy([_part(pairs[index], start, nbytes) for index, start, nbytes in slices])
        if last is not None:
            last.synchronize()


_NOTHING = torch.empty(0, dtype=torch.uint8)


def _write(store: NvmeStore, extents: Sequence[NvmeExtent], parts: Sequence[torch.Tensor]) -> None:
    _finish([store.write(extent, part) for extent, part in zip(extents, parts, strict=True)])


def _read(store: NvmeStore, extents: Sequence[NvmeExtent], parts: Sequence[torch.Tensor]) -> None:
    _finish([store.read(extent, part) for extent, part in zip(extents, parts, strict=True)])


def _part(all_of_it: Piece, start: int, nbytes: int) -> Piece:
    return all_of_it._replace(at=all_of_it.at + start, start=all_of_it.start + start, nbytes=nbytes)


def read_in_slices(
    store: NvmeStore, extents: Sequence[NvmeExtent], parts: Sequence[torch.Tensor]
) -> Iterator[Sequence[Slice]]:
    """Read `extents` into `parts`; yield slices as soon as they have come, all together that are there.

    Whoever takes them holds the interpreter's lock against the threads that read: to look at each alone, and to copy
    it by itself, took 90 us a slice, and a third of the speed.

    Raises
    ------
    StoreError
        At the end, if any of it did not come back as it was written.
    """
    came: SimpleQueue[Slice | None] = SimpleQueue()
    reads = []
    for index, (extent, part) in enumerate(zip(extents, parts, strict=True)):

        def arrived(start: int, nbytes: int, index: int = index) -> None:
            came.put((index, start, nbytes))

        reads.append(store.read(extent, part, arrived))
        reads[-1].add_done_callback(lambda read: came.put(None))
    under_way = len(reads)
    while under_way:
        there = [came.get()]
        while not came.empty():
            there.append(came.get())
        slices = [one for one in there if one is not None]
        under_way -= len(there) - len(slices)
        if slices:
            yield slices
    _finish(reads)


def _finish(transfers: Sequence[Future[None]]) -> None:
    wait(transfers)
    for transfer in transfers:
        transfer.result()
