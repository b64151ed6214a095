"""Reads and writes of the ``nvme`` tier, in threads of their own.

A write must wait for the copy that fills its block, and a read for copies that still use the block it was given: no
thread that trains may.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

from torch_tiers.allocator.host.dram import DramBlock
from torch_tiers.allocator.nvme.extent import NvmeExtent
from torch_tiers.allocator.nvme.requests import Request, RequestPool
from torch_tiers.allocator.nvme.store import NvmeStore
from torch_tiers.migrator.streams import Event
from torch_tiers.migrator.telemetry.counters import Counters
from torch_tiers.migrator.telemetry.timeline import HOST

DISK_THREADS = 4  # per direction: while some wait for a copy or a result, the others keep the store busy


class Disk:
    """Moves blocks to a store and back. Thread-safe.

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
        self._counting = threading.Lock()
        # Not an executor: the interpreter waits for all threads of those when it ends, also if a drive never answers.
        self._writers = RequestPool(DISK_THREADS, 0, "disk-write")
        try:
            self._readers = RequestPool(DISK_THREADS, 0, "disk-read")
        except BaseException:
            self._writers.close()
            raise

    def write(self, extent: NvmeExtent, block: DramBlock, filled: Event) -> Future[None]:
        """Write `block` out once it is `filled`. A request that has not begun may be cancelled."""
        future, request = _request(partial(self._write, extent, block, filled))
        self._writers.write(request)
        return future

    def read(self, extent: NvmeExtent, block: DramBlock, after: Sequence[Event]) -> Future[None]:
        """Read into `block` once `after` is passed."""
        future, request = _request(partial(self._read, extent, block, after))
        self._readers.read(request)
        return future

    def close(self) -> None:
        """Wait for what was asked for, unless a drive does not answer."""
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
