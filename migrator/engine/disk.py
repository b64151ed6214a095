"""Requests to the ``nvme`` tier, by threads of their own.

A write must wait for the copy that fills its block, and a read for copies that still use the block it was given: no
thread that trains may.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from torch_tiers.allocator.dram import DramBlock
from torch_tiers.allocator.nvme.store import NvmeExtent, NvmeStore
from torch_tiers.migrator.lanes import Event
from torch_tiers.migrator.telemetry.counters import Counters
from torch_tiers.migrator.telemetry.timeline import HOST

DISK_THREADS = 2  # per direction: while one waits for a copy or a result, the other keeps the store busy


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
        self._writers = _pool("tiers-disk-write")
        try:
            self._readers = _pool("tiers-disk-read")
        except BaseException:
            self._writers.shutdown()
            raise

    def write(self, extent: NvmeExtent, block: DramBlock, filled: Event) -> Future[None]:
        """Write `block` out once it is `filled`. A request that has not begun may be cancelled."""
        return self._writers.submit(self._write, extent, block, filled)

    def read(self, extent: NvmeExtent, block: DramBlock, after: Sequence[Event]) -> Future[None]:
        """Read into `block` once `after` is passed."""
        return self._readers.submit(self._read, extent, block, after)

    def close(self) -> None:
        """Wait for what was asked for."""
        self._writers.shutdown()
        self._readers.shutdown()

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


def _pool(name: str) -> ThreadPoolExecutor:
    """A pool that has all of its threads.

    It queues a request before it starts a thread for it. If none can be had then, the request is refused, and runs all
    the same once another thread is free: on a block, or an extent, that by then is somebody else's.
    """
    pool = ThreadPoolExecutor(DISK_THREADS, thread_name_prefix=name)
    together = threading.Barrier(DISK_THREADS)  # so that none is idle when the next is asked for
    try:
        for _ in range(DISK_THREADS):
            pool.submit(together.wait)
    except BaseException:
        together.abort()
        pool.shutdown()
        raise
    return pool
