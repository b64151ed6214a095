"""The direct path between HBM and NVMe: through staging slots in HBM, past host memory.

A drive can only access memory that was registered with it, and whose pages never move: the slots of two rings, one for
each direction. A copy within HBM, on a lane of its own, fills a slot or empties it. In between, a thread waits for the
copy before it hands the slot to the store: only our own events order a drive's work.

A group on this path is stored in *chunks* of a slot's size. Bytes that the drives do not take by any path stay in host
memory: the program's own memory is released as soon as it was copied into a slot.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from torch_tiers.allocator.errors import TiersError
from torch_tiers.allocator.nvme.ring import Ring
from torch_tiers.allocator.nvme.store import NvmeStore
from torch_tiers.allocator.sizes import format_size
from torch_tiers.migrator.offload.direct.reader import Read, Reader
from torch_tiers.migrator.offload.direct.stored import Chunk, DirectStoredGroup, Source, cut
from torch_tiers.migrator.offload.direct.writer import Write, Writer
from torch_tiers.migrator.streams import Event, Lane
from torch_tiers.migrator.streams.promised import PromisedEvent
from torch_tiers.migrator.telemetry.counters import Counters
from torch_tiers.migrator.telemetry.trace_events import HOST

log = logging.getLogger("tiers")

_LOOK = 0.1  # seconds, at a thread that does not end


@dataclass(frozen=True, slots=True)
class DirectWay:
    """What a direct way is made of.

    Attributes
    ----------
    nvme : NvmeStore
        Takes blocks of the device's memory.
    out, back : Ring
        Slots of one size, for each direction.
    write, read : float
        Bytes per second, as measured; 0 if nobody has.
    """

    nvme: NvmeStore
    out: Ring
    back: Ring
    write: float = 0.0
    read: float = 0.0

    @property
    def nbytes(self) -> int:
        """What it takes of the device's memory, outside of every allocator."""
        return self.out.nbytes_total + self.back.nbytes_total + self.nvme.scratch


class TakesAll(TiersError):
    """The staging slots of the direct way leave nothing of a device's budget; all in bytes."""

    def __init__(self, staged: int, device: torch.device, budget: int) -> None:
        super().__init__(
            f"the direct way to nvme takes {format_size(staged)} of {device}, and the budget is {format_size(budget)}: "
            'raise TIERS_HBM, or set nvme.gds to "off"'
        )


class Direct:
    """Moves groups of one device to a store and back without a copy in the host's memory. Thread-safe.

    Parameters
    ----------
    way : DirectWay
        The store and the rings, which are closed with this.
    out, back : Lane
        Copy within HBM, which nobody need count. No other thread uses them, and they are closed with this.
    counters : Counters
        Receives what the drives took and gave, and what went through the host's memory instead.
    """

    def __init__(self, way: DirectWay, out: Lane, back: Lane, counters: Counters) -> None:
        self._nvme = way.nvme
        self._rings = (way.out, way.back)
        self._chunk = way.out.slot_bytes
        self._counters = counters
        self._lock = threading.Lock()  # guards the counters, stored groups' extents, and whether this is closed
        self._closed = False
        self._warned_of_failure = False
        self._writer = Writer(way.nvme, out, way.out, self._tell)
        self._reader = Reader(way.nvme, back, way.back, self._tell)
        # Daemons: a program must be able to end although a drive does not answer.
        self._threads = [
            threading.Thread(target=worker.run, name=f"tiers-gds-{name}", daemon=True)
            for worker, name in ((self._writer, "write"), (self._reader, "read"))
        ]
        for thread in self._threads:
            thread.start()

    def offload(self, nbytes: int, sources: Iterable[Source], after: Sequence[Event]) -> DirectStoredGroup | None:
        """Start to write a group once `after` is passed; None if the drives have no room for it.

        `DirectStoredGroup.filled` tells when its sources were read.
        """
        with self._lock:
            chunks = None if self._closed else self._chunks(nbytes)
            if chunks is None:
                return None
            stored = DirectStoredGroup(nbytes, chunks, PromisedEvent("gds_write"))
            self._writer.jobs.put(Write(stored, cut(sources, chunks), after, stored.filled))
            self._counters.groups += 1
        return stored

    def read(self, stored: DirectStoredGroup, buffer: torch.Tensor, after: Sequence[Event]) -> None:
        """Start to read a stored group into `buffer`, once `after` is passed.

        `DirectStoredGroup.returned` tells when it is there.

        Raises
        ------
        TiersError
            If the session is over.
        """
        with self._lock:
            if self._closed:
                text = "the session is over, and what it had put on NVMe with it: use that within the session"
                raise TiersError(text)
            stored.returned = promised = PromisedEvent("gds_read")
            self._reader.jobs.put(Read(stored, buffer, after, promised))

    def say_failed(self, error: Exception) -> None:
        """Say, once, that a group goes through host memory instead."""
        warned, self._warned_of_failure = self._warned_of_failure, True
        if not warned:
            log.warning("a direct transfer to nvme failed; failed transfers go through host memory: %s", error)

    def drop(self, stored: DirectStoredGroup) -> None:
        """Forget a stored group, also while it is on its way: its extents are then freed when that is over."""
        stored.dropped = True
        for future in stored.under_way():
            future.add_done_callback(lambda _: self._free_if_over(stored))
        self._free_if_over(stored)

    def close(self) -> None:
        """Wait for what was asked for, unless a drive does not answer. Idempotent.

        Interrupted, it has all fail that has not begun, so that the threads end by themselves.
        """
        with self._lock:
            already, self._closed = self._closed, True
            if not already:
                self._writer.jobs.put(None)
                self._reader.jobs.put(None)
        try:
            for thread in self._threads:
                while thread.is_alive() and not self._nvme.stuck:
                    thread.join(_LOOK)
        except BaseException:
            for ring in self._rings:
                ring.close()
            raise

    def _chunks(self, nbytes: int) -> tuple[Chunk, ...] | None:
        chunks: list[Chunk] = []
        for start in range(0, nbytes, self._chunk):
            size = min(self._chunk, nbytes - start)
            extent = self._nvme.allocate(size)
            if extent is None:
                self._free(chunks)
                return None
            chunks.append(Chunk(start, size, extent))
        return tuple(chunks)

    def _free_if_over(self, stored: DirectStoredGroup) -> None:
        with self._lock:  # several threads may have been the last
            if not stored.under_way():
                self._free(stored.chunks)

    def _free(self, chunks: Iterable[Chunk]) -> None:
        for chunk in chunks:
            extent, chunk.extent, chunk.rescued = chunk.extent, None, None
            if extent is not None:
                self._nvme.free(extent)

    def _tell(self, lane: str, nbytes: int, begin: float) -> None:
        with self._lock:
            self._counters.moved[lane] += nbytes
        if (timeline := self._counters.timeline) is not None:
            timeline.copied(HOST, lane, nbytes, begin, time.perf_counter())
