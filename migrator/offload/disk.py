"""Stored groups on NVMe: their extents, and reads and writes in threads of their own.

A write must wait for the copy that fills its block, and a read for copies that still use the block it was given: no
thread that trains may.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial

from torch_tiers.allocator.errors import StoreError, TiersError
from torch_tiers.allocator.host.dram import DramBlock
from torch_tiers.allocator.nvme.extent import NvmeExtent
from torch_tiers.allocator.nvme.requests import Request, RequestPool
from torch_tiers.allocator.nvme.store import NvmeStore
from torch_tiers.migrator.offload.stored import StoredGroup
from torch_tiers.migrator.streams import Event
from torch_tiers.migrator.telemetry.counters import Counters
from torch_tiers.migrator.telemetry.trace_events import HOST

DISK_THREADS = 4  # per direction: while some wait for a copy or a result, the others keep the store busy


class Disk:
    """Moves stored groups to a store and back. To be used with the backing's lock, but for `close`.

    Parameters
    ----------
    nvme : NvmeStore
        The store.
    counters : Counters
        Receives what was moved.
    """

    def __init__(self, nvme: NvmeStore, counters: Counters) -> None:
        self._nvme = nvme
        self._counters = counters
        self._kept: dict[StoredGroup, None] = {}  # what has an extent and was not dropped
        self._closed = False
        self._counting = threading.Lock()
        # Not an executor: the interpreter waits for all threads of those when it ends, also if a drive never answers.
        self._writers = RequestPool(DISK_THREADS, 0, "disk-write")
        try:
            self._readers = RequestPool(DISK_THREADS, 0, "disk-read")
        except BaseException:
            self._writers.close()
            raise

    @property
    def largest(self) -> int:
        """Bytes of the largest stored group that has an extent and was not dropped."""
        return max((stored.nbytes for stored in self._kept), default=0)

    def write(self, stored: StoredGroup) -> bool:
        """Start to write a stored group out, once its block is filled; return False if it need not or cannot go."""
        if stored.block is None or stored.filled is None or stored.writing is not None or stored.extent is not None:
            return False  # such as if another device's engine was here first
        extent = stored.reserved or self._nvme.allocate(stored.nbytes)
        if extent is None:
            return False
        stored.reserved = extent  # not lost where this is interrupted
        future, request = _request(partial(self._write, extent, stored.block, stored.filled))
        self._submit(self._writers.write, request, future)
        stored.writing, stored.extent, stored.reserved = future, extent, None
        self._kept[stored] = None
        return True

    def written(self, stored: StoredGroup) -> bool:
        """Take note that a write is over; return whether the block is needed no more."""
        assert stored.writing is not None
        error = stored.writing.exception()
        stored.writing = None
        if error is None:
            return True
        # The bytes are still in their block: nothing is lost, the stored group just stays in DRAM.
        self.free(stored)
        stored.stuck = True
        if not isinstance(error, StoreError):
            raise error
        return False  # the store has said what happened, once for its directory

    def read(self, stored: StoredGroup, after: Sequence[Event]) -> None:
        """Start to read a stored group into its block, once `after` is passed.

        Raises
        ------
        TiersError
            If this is closed.
        """
        assert stored.block is not None and stored.extent is not None
        if self._closed:
            raise TiersError("the session is over, and what it had put on NVMe with it: use that within the session")
        future, request = _request(partial(self._read, stored.extent, stored.block, after))
        self._submit(self._readers.read, request, future)
        stored.reading = future

    def abandon(self, stored: StoredGroup) -> None:
        """Take note that nobody will read a stored group again; `free` it once no request uses it."""
        self._kept.pop(stored, None)
        if stored.writing is not None:
            stored.writing.cancel()  # if it has not begun, nobody needs it any more

    def discard(self, stored: StoredGroup) -> None:
        """Forget what the extent of a stored group has, as the bytes are about to change; the next write goes there.

        It blocks the host while a write of the group is under way.
        """
        if stored.writing is not None and not stored.writing.cancel():
            with self._counters.waiting("disk_write"):
                wait([stored.writing])
        stored.writing = None
        if stored.extent is not None:
            stored.reserved, stored.extent = stored.extent, None
            self._kept.pop(stored, None)

    def free(self, stored: StoredGroup) -> None:
        """Free the extent of a stored group, if it has one."""
        for extent in (stored.extent, stored.reserved):
            if extent is not None:
                self._nvme.free(extent)
        stored.extent = stored.reserved = None
        self._kept.pop(stored, None)

    @staticmethod
    def _submit(queue: Callable[[Request], None], request: Request, future: Future[None]) -> None:
        """Queue a request. If this is interrupted, nobody will use the group's block and extent when it returns."""
        try:
            queue(request)
        except BaseException:
            if not future.cancel():
                wait([future])
            raise

    def close(self) -> None:
        """Wait for what was asked for, unless a drive does not answer."""
        self._closed = True
        for pool in (self._writers, self._readers):
            pool.close(lambda thread: self._nvme.stuck)

    def _write(self, extent: NvmeExtent, block: DramBlock, filled: Event) -> None:
        filled.synchronize()
        begin = time.perf_counter()
        self._nvme.write(extent, block.padded[: extent.nbytes]).result()
        self._count("disk_write", block.nbytes, begin)

    def _read(self, extent: NvmeExtent, block: DramBlock, after: Sequence[Event]) -> None:
        for event in after:
            event.synchronize()
        begin = time.perf_counter()
        self._nvme.read(extent, block.padded[: extent.nbytes]).result()
        self._count("disk_read", block.nbytes, begin)

    def _count(self, lane: str, nbytes: int, begin: float) -> None:
        with self._counting:  # several threads; not the backing's lock, whose holder may be waiting for this one
            self._counters.moved[lane] += nbytes
        if (timeline := self._counters.timeline) is not None:
            timeline.copied(HOST, lane, nbytes, begin, time.perf_counter())


def _request(work: Callable[[], None]) -> tuple[Future[None], Request]:
    """Wrap `work` for a pool; the future tells what became of it."""
    future: Future[None] = Future()

    def request() -> None:
        if not future.set_running_or_notify_cancel():
            return
        error = _error_of(work)
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)

    return future, request


def _error_of(work: Callable[[], None]) -> BaseException | None:
    """What `work` raises. Its traceback ends here, and so does not hold the future that holds it."""
    try:
        work()
    except BaseException as error:
        return error
    return None
