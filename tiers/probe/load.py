"""Processes that load the memory bus. Imported by each of them, so it must stay light."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from multiprocessing.sharedctypes import Synchronized
from types import TracebackType
from typing import Any

import numpy as np

from torch_tiers.allocator.errors import TiersError
from torch_tiers.allocator.sizes import MiB

BYTES_PER_WORKER = 128 * MiB  # half source, half destination: past the share of a core in any cache
_STARTED_WITHIN = 60  # seconds


class HostLoad:
    """Processes that copy in host memory with numpy, as many at a time as they are told to. A context manager.

    Parameters
    ----------
    workers
        How many there can be.
    cores
        Where they run.
    """

    def __init__(self, workers: int, cores: frozenset[int]) -> None:
        # Spawned: a fork would inherit locks of other threads and a CUDA context that is useless to it.
        context = multiprocessing.get_context("spawn")
        self._active = context.Value("i", 0)
        self._copied = context.RawArray("Q", workers)
        self._ready = context.Barrier(workers + 1)
        self._workers = [
            context.Process(
                target=_work,
                args=(index, self._active, self._copied, self._ready, cores, os.getpid()),
                daemon=True,
            )
            for index in range(workers)
        ]

    def __enter__(self) -> HostLoad:
        try:
            for worker in self._workers:
                worker.start()
            self._ready.wait(_STARTED_WITHIN)
        except BaseException as error:
            self._stop()
            if isinstance(error, threading.BrokenBarrierError):
                text = (
                    f"not all {len(self._workers)} processes that load the host started within {_STARTED_WITHIN} s: "
                    f"try again while the machine is less busy, with {len(self._workers)} cores and "
                    f"{len(self._workers) * BYTES_PER_WORKER // MiB} MiB to spare, or leave --contention out"
                )
                raise TiersError(text) from None
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop()

    def set(self, workers: int) -> None:
        """Let so many of them copy."""
        self._active.value = workers

    def copied(self) -> int:
        """Bytes that were copied so far, by all of them."""
        return sum(self._copied)

    def _stop(self) -> None:
        started = [worker for worker in self._workers if worker.pid is not None]
        for worker in started:
            worker.terminate()
        for worker in started:
            worker.join()


def _work(
    index: int,
    active: Synchronized[int],
    copied: Any,
    ready: threading.Barrier,
    cores: frozenset[int],
    parent: int,
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this process
    os.sched_setaffinity(0, cores)
    source = np.ones(BYTES_PER_WORKER // 2, np.uint8)
    destination = np.zeros_like(source)
    ready.wait(_STARTED_WITHIN)
    while os.getppid() == parent:  # a parent that was killed could not end this process
        if index < active.value:
            destination[:] = source
            copied[index] += source.nbytes
        else:
            time.sleep(0.005)
