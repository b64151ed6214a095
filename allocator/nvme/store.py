"""The ``nvme`` tier: extents striped over files in several directories, moved in the background, checked.

Checksums are computed while the drives work: that of a stripe being written, in another thread; that of one which was
read, by the thread that read it, while another reads the next. So the drives never wait for them, as long as the CPU is
faster.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import torch

from torch_tiers.allocator.at_exit import close_at_exit
from torch_tiers.allocator.errors import CorruptionError, StoreError
from torch_tiers.allocator.host.ledger import Account
from torch_tiers.allocator.host.room import Room
from torch_tiers.allocator.nvme.backend import BLOCK, Backend, read_all, write_all
from torch_tiers.allocator.nvme.checksum import SCRATCH
from torch_tiers.allocator.nvme.choose import Gds, choose_backend
from torch_tiers.allocator.nvme.extent import NvmeExtent, Stripe
from torch_tiers.allocator.nvme.requests import Request, RequestPool, Rest, Transfer
from torch_tiers.allocator.nvme.volume import Volume, allocate_in
from torch_tiers.allocator.nvme.watch import Watch
from torch_tiers.allocator.sizes import GiB, MiB, round_up

_SUMMING_THREADS = 4  # or half of the cores; reads are summed up by the threads that read
STRIPE, DEPTH = 8 * MiB, 12
"""A request takes 50 us of the interpreter's lock, and threads beyond the cores lose. Of a file in memory 8 of 4 MiB in
flight read 16 to 23 GB/s with their sums on two hosts of an H100, 12 of 8 MiB 25 to 26; to a drive all is one."""


def _summing_threads() -> int:
    return max(1, min(_SUMMING_THREADS, len(os.sched_getaffinity(0)) // 2))


Arrived = Callable[[int, int], None]
"""Called with the first byte and the number of bytes of each part of a block that was read and checked."""


class NvmeStore:
    """Keeps blocks of memory on disk, up to a hard cap. Thread-safe.

    Each directory gets one private file (mode 0600, no name, gone with the process) and an equal share of the
    capacity. A request that fails, or reads other data than was written, is tried once more. After three failed writes
    of extents in a row, or when the disk is full, nothing more is written to a directory; what lies there can still be
    read. A drive that does not answer for five seconds is logged.

    Parameters
    ----------
    paths
        Directories, best on different drives: every extent is split over all of them, by how fast they are.
    capacity
        Bytes, of all directories together. Disk space is claimed by `step` at a time.
    gds
        Whether GPU memory must (``"require"``) or may (``"prefer"``) go straight to the drives.
    checksum
        Check on every read that what came back is what was written: by xxh3 where it is in host memory when it is
        written, by a sum that a GPU computes as well where it is in GPU memory.
    stripe
        Bytes of a request; 1 to 16 MiB run at a drive's full speed.
    depth
        Requests in flight at once.
    step
        Bytes that a file grows by.
    backend
        Opens a directory's file; by default chosen by `gds`.
    account
        What the files grow by is claimed there.
    rooms
        For each directory that lies in memory, such as a tmpfs: tells what the system leaves of that. Unbounded, the
        kernel would end the program.

    Raises
    ------
    StoreError
        If no file can be made in one of `paths`.
    TiersError
        If `gds` is ``"require"`` and cannot be had.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        capacity: int,
        *,
        gds: Gds,
        checksum: bool = True,
        stripe: int = STRIPE,
        depth: int = DEPTH,
        step: int = GiB,
        backend: Callable[[Path], Backend] | None = None,
        account: Account | None = None,
        rooms: Mapping[Path, Callable[[], Room]] | None = None,
    ) -> None:
        if not paths or capacity < 0 or depth <= 0 or stripe <= 0 or stripe % BLOCK:
            raise ValueError("a store needs paths, capacity >= 0, depth > 0 and stripes of whole 4 KiB")
        self._stripe = stripe
        self._lock = threading.Lock()  # guards the volumes' accounts and the three below
        self._used = 0
        self._peak = 0
        self._closed = False
        self._volumes: list[Volume] = []
        open_backend = backend or choose_backend(gds)
        self._watch = Watch()
        try:
            for path in paths:
                room = rooms.get(path) if rooms else None
                self._volumes.append(Volume(open_backend(path), capacity // len(paths), step, account, room))
            self._drives = RequestPool(depth, _summing_threads() if checksum else 0, "nvme")
        except BaseException:
            self._watch.close()
            self._close_files()
            raise
        self.takes_device_memory = all(volume.backend.device_memory for volume in self._volumes)
        self._sums = checksum
        close_at_exit(self)

    @property
    def capacity(self) -> int:
        """Bytes that it can hold now; falls when a disk is full or a directory fails."""
        with self._lock:
            return sum(volume.capacity for volume in self._volumes)

    @property
    def scratch(self) -> int:
        """Bytes of each GPU's memory that its checksums take."""
        return SCRATCH * self._stripe if self._sums and self.takes_device_memory else 0

    @property
    def where(self) -> str:
        """Its directories, for messages."""
        return ", ".join(str(volume.backend.path) for volume in self._volumes)

    @property
    def directory(self) -> Path:
        """The first of them, where temporary files may lie."""
        return Path(self._volumes[0].backend.path)

    @property
    def used(self) -> int:
        """Bytes in extents."""
        return self._used

    @property
    def peak(self) -> int:
        """The highest that `used` has been."""
        return self._peak

    @property
    def bounced(self) -> int:
        """Bytes from and to GPU memory so far that went through host memory, as the direct way failed."""
        return sum(volume.backend.bounced for volume in self._volumes)

    @property
    def stuck(self) -> bool:
        """Whether a drive does not answer: nobody should wait for the end of its requests."""
        return self._watch.stuck()

    def allocate(self, nbytes: int) -> NvmeExtent | None:
        """Take room for `nbytes`, rounded up to 4 KiB, or return None if the capacity is reached."""
        if nbytes <= 0:
            raise ValueError(f"an extent needs a positive size, not {nbytes}")
        nbytes = round_up(nbytes, BLOCK)
        with self._lock:
            extent = self._take(nbytes)
        for volume in self._volumes:
            volume.say()
        return extent

    def _take(self, nbytes: int) -> NvmeExtent | None:
        stripes: list[Stripe] = []
        for start in range(0, nbytes, self._stripe):
            taken = allocate_in(self._volumes, min(self._stripe, nbytes - start))
            if taken is None:
                self._release(stripes)
                return None
            stripes.append(Stripe(*taken, start))
        self._used += nbytes
        self._peak = max(self._peak, self._used)
        return NvmeExtent(nbytes, tuple(stripes))

    def free(self, extent: NvmeExtent) -> None:
        """Free `extent`; none of its transfers may be under way.

        Raises
        ------
        ValueError
            If it was freed before.
        """
        with self._lock:
            self._release(extent.stripes)
            self._used -= extent.nbytes

    def write(self, extent: NvmeExtent, block: torch.Tensor) -> Future[None]:
        """Write all of `extent` from `block`, in the background.

        Parameters
        ----------
        block
            Flat uint8 tensor of exactly ``extent.nbytes`` bytes, its address a multiple of 4 KiB. It must not
            change before the future is done. GPU memory needs a backend for it, and no kernel at work on it.

        Returns
        -------
        Future[None]
            Raises StoreError if the data is not on disk; the extent is then good for nothing but `free`.
        """
        self._check(extent, block)
        transfer = Transfer(len(extent.stripes) * (2 if self._sums else 1), partial(self._judge, extent))
        for stripe in extent.stripes:
            part = stripe.of(block)
            stripe.written = False
            self._drives.write(self._request(transfer, stripe, partial(self._write_stripe, stripe, part)))
            if self._sums:
                self._drives.beside(self._request(transfer, stripe, partial(stripe.sum_up, part)))
        return transfer.future

    def read(self, extent: NvmeExtent, block: torch.Tensor, arrived: Arrived | None = None) -> Future[None]:
        """Read all of `extent` into `block`, in the background, ahead of every waiting write.

        Parameters
        ----------
        block
            As for `write`; its contents count only if the future succeeds.
        arrived
            Called by threads of the store, in any order, before the future is done: so the first part can be on its
            next way while the last is still read. It must not block.

        Returns
        -------
        Future[None]
            Raises StoreError, or CorruptionError if what came back is not what was written.

        Raises
        ------
        ValueError
            If the extent has not been written, or its write is still under way.
        """
        self._check(extent, block)
        if not all(stripe.written for stripe in extent.stripes):
            raise ValueError(f"{extent} cannot be read: it has not been written")
        transfer = Transfer(len(extent.stripes))
        for stripe in extent.stripes:
            part = stripe.of(block)
            fetch = partial(self._move, read_all, "read", stripe, part)
            rest = self._request(transfer, stripe, partial(self._hand_out, stripe, part, arrived))
            self._drives.read(self._request(transfer, stripe, fetch, rest))
        return transfer.future

    def close(self) -> None:
        """End what is in flight, fail what is queued, and free the disk space. Idempotent.

        Where a drive does not answer, its requests are left alone after a while, and the files stay open: the system
        frees their space when the process has ended.
        """
        self._closed = True  # from here on queued requests fail instead of running
        ended = self._drives.close(self._watch.stuck)
        self._watch.close()
        if ended:
            self._close_files()

    def _release(self, stripes: Sequence[Stripe]) -> None:
        for stripe in stripes:
            stripe.volume.free(stripe.extent)

    def _check(self, extent: NvmeExtent, block: torch.Tensor) -> None:
        if block.dtype != torch.uint8 or block.dim() != 1 or not block.is_contiguous():
            raise ValueError("a store moves flat, contiguous uint8 tensors")
        if block.numel() != extent.nbytes or block.data_ptr() % BLOCK:
            raise ValueError(
                f"a block for {extent} needs exactly {extent.nbytes} bytes at a multiple of {BLOCK}, "
                f"not {block.numel()} at {block.data_ptr():#x}"
            )
        if block.is_cuda and not self.takes_device_memory:
            raise ValueError("this store takes no GPU memory: that needs kvikio (nvme.gds)")

    def _request(
        self, transfer: Transfer, stripe: Stripe, work: Callable[[], None], rest: Request | None = None
    ) -> Request:
        """Wrap `work` for the pool. If it succeeds, `rest` goes on with the same part of the transfer."""

        def request() -> Rest | None:
            error: Exception | None = None
            try:
                if self._closed:
                    path, extent = stripe.volume.backend.path, stripe.extent
                    raise StoreError(path, extent.offset, extent.nbytes, "transfer", "the store is closed")
                if not transfer.failed:
                    work()
            except Exception as caught:  # all of it belongs to who waits, not to this thread
                error = caught
            if rest is None or error is not None or transfer.failed:
                transfer.part_done(error)
                return None
            return rest

        return request

    def _write_stripe(self, stripe: Stripe, part: torch.Tensor) -> None:
        self._move(write_all, "write", stripe, part)
        stripe.written = True

    def _judge(self, extent: NvmeExtent, error: Exception | None) -> None:
        """Tell the volumes how the write of an extent ended: as one, as one bad moment meets all of its requests."""
        for volume in {stripe.volume for stripe in extent.stripes}:
            with self._lock:
                if error is None:
                    volume.write_succeeded()
                elif isinstance(error, StoreError) and error.action == "write" and error.path == volume.backend.path:
                    volume.write_failed(error)
            volume.say()

    def _move(
        self, move: Callable[[Backend, torch.Tensor, int], None], action: str, stripe: Stripe, part: torch.Tensor
    ) -> None:
        backend, extent, began = stripe.volume.backend, stripe.extent, time.perf_counter()
        with self._watch.watched(action, backend.path, extent.nbytes):
            move(backend, part, extent.offset)
        with self._lock:
            stripe.volume.note_request(extent.nbytes, time.perf_counter() - began)

    def _hand_out(self, stripe: Stripe, part: torch.Tensor, arrived: Arrived | None) -> None:
        if self._sums:
            self._verify(stripe, part)
        if arrived is not None:
            arrived(stripe.start, part.numel())

    def _verify(self, stripe: Stripe, part: torch.Tensor) -> None:
        try:
            stripe.verify(part)
        except CorruptionError as error:  # on the drive, or on the way from there?
            self._move(read_all, "read", stripe, part)
            stripe.verify(part)
            with self._lock:
                stripe.volume.read_differed(error)
            stripe.volume.say()

    def _close_files(self) -> None:
        for volume in self._volumes:
            volume.close()
