"""From NVMe to HBM: a thread that has the store fill slots and empties them into buffers."""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple

import torch

from torch_tiers.allocator.errors import TiersError
from torch_tiers.allocator.nvme.ring import Ring
from torch_tiers.allocator.nvme.store import NvmeStore
from torch_tiers.migrator.offload.direct.stored import Chunk, DirectStoredGroup
from torch_tiers.migrator.streams import Event, Lane
from torch_tiers.migrator.streams.pieces import whole
from torch_tiers.migrator.streams.promised import PromisedEvent


@dataclass(eq=False, slots=True)
class Read:
    """A stored group to read into `buffer`, which may be written to once `after` is passed."""

    stored: DirectStoredGroup
    buffer: torch.Tensor
    after: Sequence[Event]
    promised: PromisedEvent
    error: BaseException | None = None  # the first of its chunks


class _Coming(NamedTuple):
    """A chunk on its way into a slot; one without a slot is in the host's memory."""

    job: Read
    chunk: Chunk
    slot: torch.Tensor | None
    reading: Future[None]
    begin: float


class Reader:
    """Reads stored groups in order, with all slots at work.

    The next one's chunks are read while the last one's are copied.

    Parameters
    ----------
    nvme, lane, ring
        Where from, by which lane and by whose slots.
    tell : callable
        Told by which lane each chunk came, its bytes, and when that began.
    """

    def __init__(self, nvme: NvmeStore, lane: Lane, ring: Ring, tell: Callable[[str, int, float], None]) -> None:
        self.jobs: queue.SimpleQueue[Read | None] = queue.SimpleQueue()
        self._nvme, self._lane, self._ring = nvme, lane, ring
        self._tell = tell
        self._coming: deque[_Coming] = deque()
        self._lost = 0  # slots that no one may use any more
        self._landed: deque[tuple[Event, torch.Tensor]] = deque()  # slots that are being emptied

    def run(self) -> None:
        """Work until a job is None."""
        while (job := self._next()) is not None:
            self._fetch_all(job)
            del job  # with its buffer
        while self._coming:
            self._land()
        while self._landed:
            self._empty()
        self._ring.close()
        self._lane.close()

    def _next(self) -> Read | None:
        """The next job. While there is none, chunks land."""
        while self._coming and self.jobs.empty():
            self._land()
        return self.jobs.get()

    def _fetch_all(self, job: Read) -> None:
        for chunk in job.stored.chunks:
            if len(self._coming) == self._ring.slots:
                self._land()
            self._coming.append(self._fetch(job, chunk))

    def _fetch(self, job: Read, chunk: Chunk) -> _Coming:
        """Have one chunk read into a slot."""
        begin = time.perf_counter()
        slot: torch.Tensor | None = None
        reading: Future[None] = Future()
        try:
            chunk.written.result()  # it may still be on its way to the drive
            if chunk.extent is None:
                reading.set_result(None)
            else:
                while self._landed and (_is_over(self._landed[0][0]) or self._slots_in_use() >= self._ring.slots):
                    self._empty()
                if self._lost >= self._ring.slots:
                    raise TiersError("no staging slot is left: each copy out of one failed, as the GPU has")
                slot = self._ring.take()
                reading = self._nvme.read(chunk.extent, slot[: chunk.extent.nbytes])
        except BaseException as error:  # belongs to who waits
            reading = Future()
            reading.set_exception(error)
        return _Coming(job, chunk, slot, reading, begin)

    def _slots_in_use(self) -> int:
        return self._lost + len(self._landed) + sum(coming.slot is not None for coming in self._coming)

    def _land(self) -> None:
        """Copy one chunk from its slot into the buffer."""
        job, chunk, slot, reading, begin = self._coming.popleft()
        event: Event | None = None
        try:
            reading.result()
            source = chunk.rescued if slot is None else slot[: chunk.nbytes]
            if source is not None and job.error is None:
                target = job.buffer[chunk.start : chunk.start + chunk.nbytes]
                event = self._lane.copy([whole(target, source)], job.after)
                if slot is None:
                    event.synchronize()  # the chunk may be forgotten from now on, and its memory with it
                self._tell("h2d" if slot is None else "gds_read", chunk.nbytes, begin)
        except BaseException as error:  # belongs to who waits
            job.error = job.error or error
        if slot is not None and event is not None:
            self._landed.append((event, slot))
        elif slot is not None:
            self._ring.give(slot)
        if chunk is job.stored.chunks[-1]:  # nothing of the stored group is read any more
            self._answer(job, event)

    def _answer(self, job: Read, last: Event | None) -> None:
        if job.error is None:
            job.promised.set(last)
            return
        for copy, _ in self._landed:  # nothing writes into the buffer once the failure is known
            _has_succeeded(copy)
        job.promised.fail(job.error)

    def _empty(self) -> None:
        event, slot = self._landed.popleft()
        if _has_succeeded(event):
            self._ring.give(slot)
        else:  # the lane may still read it
            self._lost += 1


def _has_succeeded(event: Event) -> bool:
    """Wait for a copy; False if it failed, as it does where the device has."""
    try:
        event.synchronize()
    except Exception:  # whoever waits for the buffer is told; this thread goes on
        return False
    return True


def _is_over(event: Event) -> bool:
    try:
        return event.query()
    except Exception:
        return False
