"""From HBM to NVMe: a thread that fills slots and hands them to the store."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import torch

from torch_tiers.allocator.nvme.ring import Ring
from torch_tiers.allocator.nvme.store import NvmeStore
from torch_tiers.migrator.offload.direct.stored import Chunk, DirectStoredGroup, Source, into
from torch_tiers.migrator.streams import Event, Lane
from torch_tiers.migrator.streams.promised import PromisedEvent

log = logging.getLogger("tiers")


class Write(NamedTuple):
    """A stored group to write, from `sources` of each chunk once `after` is passed."""

    stored: DirectStoredGroup
    sources: list[list[Source]]
    after: Sequence[Event]
    promised: PromisedEvent


class Writer:
    """Writes stored groups, in order. What the drives do not take, by any way, it keeps in the host's memory.

    Parameters
    ----------
    nvme, lane, ring
        Where to, by which lane and by whose slots.
    tell : callable
        Told by which lane each chunk went, its bytes, and when that began.
    """

    def __init__(self, nvme: NvmeStore, lane: Lane, ring: Ring, tell: Callable[[str, int, float], None]) -> None:
        self.jobs: queue.SimpleQueue[Write | None] = queue.SimpleQueue()
        self._nvme, self._lane, self._ring = nvme, lane, ring
        self._tell = tell
        self._warned_of_rescue = False

    def run(self) -> None:
        """Work until a job is None, and wait for the drives."""
        while (job := self.jobs.get()) is not None:
            self._write(*job)
            del job
        self._ring.drain()
        self._ring.close()
        self._lane.close()

    def _write(
        self, stored: DirectStoredGroup, sources: list[list[Source]], after: Sequence[Event], promised: PromisedEvent
    ) -> None:
        last: Event | None = None
        begun = 0
        try:
            for chunk in stored.chunks:
                if stored.dropped:
                    break
                slot = self._ring.take()
                try:
                    # Out of the list at once: whoever waits for `promised` may look whether the sources are free.
                    last = self._lane.copy(into(slot, sources.pop(0)), after)
                except BaseException:
                    self._ring.give(slot)
                    raise
                begun += 1
                if begun == len(stored.chunks):
                    promised.set(last)
                self._store(chunk, slot, last)
        except BaseException as error:  # belongs to who waits
            if not promised.is_there:
                sources.clear()
                promised.fail(error)
        for chunk in stored.chunks[begun:]:
            chunk.written.set_result(None)  # nobody will read it
        sources.clear()
        if not promised.is_there:
            promised.set(last)

    def _store(self, chunk: Chunk, slot: torch.Tensor, filled: Event) -> None:
        """Hand a slot to the store once it is filled. It goes back to the ring when its bytes are safe."""
        assert chunk.extent is not None
        try:
            filled.synchronize()
        except BaseException as error:
            self._ring.give(slot)
            chunk.written.set_exception(error)
            raise
        begin = time.perf_counter()
        try:
            writing = self._nvme.write(chunk.extent, slot[: chunk.extent.nbytes])
        except BaseException as error:  # such as no thread to be had
            writing = Future()
            writing.set_exception(error)
        writing.add_done_callback(lambda future: self._written(future, chunk, slot, begin))

    def _written(self, writing: Future[None], chunk: Chunk, slot: torch.Tensor, begin: float) -> None:
        failed: BaseException | None = None
        try:
            error = writing.exception()
            if error is None:
                self._tell("gds_write", chunk.nbytes, begin)
            else:
                self._rescue(chunk, slot, error)
        except BaseException as caught:  # such as no memory to keep it in
            failed = caught
        try:  # who waits for it must not wait for ever
            if failed is None:
                chunk.written.set_result(None)
            else:
                chunk.written.set_exception(failed)
        finally:
            self._ring.give(slot)

    def _rescue(self, chunk: Chunk, slot: torch.Tensor, error: BaseException) -> None:
        """Keep in the host's memory what the drives did not take: the program's own may be gone by now."""
        if not isinstance(error, Exception):
            raise error
        begin = time.perf_counter()
        chunk.rescued = slot[: chunk.nbytes].to("cpu", copy=True)
        self._tell("d2h", chunk.nbytes, begin)
        extent, chunk.extent = chunk.extent, None
        if extent is not None:
            self._nvme.free(extent)
        warned, self._warned_of_rescue = self._warned_of_rescue, True
        if not warned:
            log.warning("nvme refused a write; refused bytes stay in host memory, beyond its budget: %s", error)
