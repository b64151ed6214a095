"""The interface of a store's file (`Backend`), and whole transfers: what stops half-way goes on, or is tried again."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from typing import Protocol

import torch

from torch_tiers.allocator.errors import StoreError
from torch_tiers.allocator.sizes import KiB

BLOCK = 4 * KiB
"""Unit of offsets, lengths and addresses: what O_DIRECT and GPUDirect Storage ask for on any drive."""

_WAITS = (0.001, 0.01, 0.1, 1.0)
"""Seconds before each further try of a transfer for which there are no resources now (EAGAIN)."""
_PAUSE = 0.1
"""Seconds before one that failed (EIO) is tried again: time for a path to the drive to come back."""


class Backend(Protocol):
    """One private file that nobody else can open and that is gone when its process is.

    The two transfers behave as the system calls: they may move fewer bytes than asked for, and raise OSError.
    Several threads call them at once, and they release the GIL.
    """

    @property
    def path(self) -> str:
        """The directory that the file was made in, for messages."""

    @property
    def device_memory(self) -> bool:
        """Whether blocks may lie in GPU memory."""

    @property
    def bounced(self) -> int:
        """Bytes from and to GPU memory so far that went through host memory, as the direct way failed."""

    def grow(self, size: int) -> None:
        """Allocate the file on disk up to `size` bytes. OSError if the disk, a quota or a limit says no."""

    def pread(self, block: torch.Tensor, offset: int) -> int:
        """Fill flat uint8 `block` from `offset`; returns the bytes read."""

    def pwrite(self, block: torch.Tensor, offset: int) -> int:
        """Write flat uint8 `block` at `offset`; returns the bytes written."""

    def close(self) -> None:
        """Free the file's space. Nothing is in flight by then."""


def read_all(backend: Backend, block: torch.Tensor, offset: int) -> None:
    """Fill `block` (whole `BLOCK`) from `offset`, or raise StoreError.

    An interrupted transfer goes on. One that the drive puts off (EAGAIN) is tried again for a second, and one that
    fails (EIO) once.
    """
    _transfer(backend, "read", backend.pread, block, offset)


def write_all(backend: Backend, block: torch.Tensor, offset: int) -> None:
    """Write `block` (whole `BLOCK`) at `offset`, or raise StoreError. It is tried again like `read_all`."""
    _transfer(backend, "write", backend.pwrite, block, offset)


def _transfer(
    backend: Backend, action: str, move: Callable[[torch.Tensor, int], int], block: torch.Tensor, offset: int
) -> None:
    done, failed = 0, False
    waits = iter(_WAITS)
    while (left := block.numel() - done) > 0:
        try:
            count = move(block[done:], offset + done)
        except InterruptedError:
            continue
        except OSError as error:
            if error.errno == errno.EAGAIN and (wait := next(waits, None)) is not None:
                time.sleep(wait)
                continue
            if error.errno == errno.EIO and not failed:
                failed = True
                time.sleep(_PAUSE)
                continue
            reason = error.strerror or str(error)
            raise StoreError(backend.path, offset + done, left, action, reason) from error
        whole = count - count % BLOCK  # O_DIRECT cannot go on within a block: the rest of it is moved again
        if whole <= 0:
            reason = f"only {count} bytes were transferred"
            raise StoreError(backend.path, offset + done, left, action, reason)
        done += whole
