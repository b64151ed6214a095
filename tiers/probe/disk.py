"""The paths to and from drives, through the store that runs."""

from __future__ import annotations

import itertools
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path as Folder
from typing import Literal

import torch

from torch_tiers.allocator.errors import TierFull
from torch_tiers.allocator.nvme.extent import NvmeExtent
from torch_tiers.allocator.nvme.store import NvmeStore
from torch_tiers.allocator.sizes import MiB, format_size
from torch_tiers.probe.buffers import Buffer
from torch_tiers.probe.measure import Run, Waived, copies, window
from torch_tiers.probe.pattern import fill, matches
from torch_tiers.probe.results import Path

Way = Literal["write", "read"]

STEP = 64 * MiB
"""Bytes that the files grow by: a probe takes little more disk than it moves."""


class DiskPath:
    """Between memory and a store that lives for the copies of one size.

    Parameters
    ----------
    buffer
        The memory.
    directories
        Of the store.
    open_store
        Opens a store of so many bytes in `directories`, growing by `STEP`.
    ring
        Bytes on disk that successive runs go round: more than a drive's cache holds, to see past it.
    refusal
        Says why it cannot run, or returns None.
    """

    def __init__(
        self,
        path: Path,
        way: Way,
        buffer: Buffer,
        directories: Sequence[Folder],
        open_store: Callable[[int], NvmeStore],
        cores: frozenset[int],
        *,
        ring: int = 0,
        refusal: Callable[[], str | None] = lambda: None,
    ) -> None:
        self.path = path
        self.cores = cores
        self._way = way
        self._buffer = buffer
        self._directories = directories
        self._open_store = open_store
        self._ring = ring
        self._refusal = refusal
        self._store: NvmeStore | None = None
        self._batches: Iterator[Sequence[NvmeExtent]] = iter(())
        self._last: Sequence[NvmeExtent] = ()
        self._salt = 0

    def why_not(self) -> str | None:  # noqa: D102
        if not self._directories:
            return "no directory is named: --nvme-path DIR, or nvme.paths in tiers.toml"
        return self._refusal()

    def prepare(self, size: int) -> None:  # noqa: D102
        self._buffer.take(size)
        rounds = max(self._ring // window(size), 1)
        store = self._store = self._open(size, rounds)
        batches = [[_extent(store, size) for _ in range(copies(size))] for _ in range(rounds)]
        self._batches = itertools.cycle(batches)
        self._salt = secrets.randbits(32)
        fill(self._buffer.memory, self._salt)
        self._settle()
        if self._way == "read":
            for batch in batches:
                self._buffer.write(store, batch)
            self._clear()

    def run(self, size: int) -> Run:  # noqa: D102
        assert self._store is not None
        move = self._buffer.write if self._way == "write" else self._buffer.read
        self._last = next(self._batches)
        start = time.perf_counter()
        move(self._store, self._last)
        return Run(window(size), time.perf_counter() - start)

    def intact(self) -> bool:  # noqa: D102
        assert self._store is not None
        if self._way == "write":
            self._clear()
            self._buffer.read(self._store, self._last)
        return matches(self._buffer.memory, self._salt)

    def release(self) -> None:  # noqa: D102
        if self._store is not None:
            self._store.close()  # waits for what is in flight: only then may its memory go
            self._store = None
        self._batches, self._last = iter(()), ()
        self._buffer.give()

    def _open(self, size: int, rounds: int) -> NvmeStore:
        # Stripes take turns between the directories, so one may get a little more than its share.
        slack = len(self._directories) * max(window(size), STEP)
        capacity = rounds * window(size) + slack
        share = capacity // len(self._directories)
        for directory in self._directories:
            free = shutil.disk_usage(directory).free
            if free < share:
                raise Waived(f"{directory} has {format_size(free)} free, {format_size(share)} are needed")
        return self._open_store(capacity)

    def _clear(self) -> None:
        self._buffer.clear()
        self._settle()

    def _settle(self) -> None:
        # A store and a lane do not know of the stream that has just written GPU memory.
        if self._buffer.memory.is_cuda:
            torch.cuda.synchronize(self._buffer.memory.device)


def _extent(store: NvmeStore, size: int) -> NvmeExtent:
    extent = store.allocate(size)
    if extent is None:
        raise TierFull("nvme", store.where, size, store.used, store.capacity)
    return extent
