"""A store's file that GPU memory is written to and read from through cuFile. kvikio is imported with the first one.

Requests go to cuFile itself (`libcufile`). In compatibility mode they are kvikio's calls that block their thread: its
pool has one thread unless told otherwise.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import torch

from torch_tiers.allocator.errors import StoreError, TiersError
from torch_tiers.allocator.nvme.backend import BLOCK
from torch_tiers.allocator.nvme.bounce import Bounce
from torch_tiers.allocator.nvme.cufile import base_of, begin, compat_mode, in_context, refusal
from torch_tiers.allocator.nvme.libcufile import Handle
from torch_tiers.allocator.nvme.posix import PosixFile

log = logging.getLogger("tiers")

Mode = Literal["gds", "auto", "compat"]
"""A file that cuFile takes, or none; bounce buffers of our own where it does not; kvikio's bounce buffers alone."""

_ENOUGH = 3
"""Failures in a row after which cuFile is not called for a file any more."""

_said: set[str] = set()  # directories whose failure has been spoken of


def kvikio_refusal() -> str | None:
    """Say why kvikio cannot be used here, or return None."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    if reason := refusal():
        return reason
    try:
        import kvikio  # noqa: F401
    except ImportError as error:
        return f"kvikio cannot be imported: {error}"
    return None


def _in_gpu_memory(block: torch.Tensor) -> bool:
    return block.is_cuda


class KvikioFile:
    """A `Backend` for memory of the host and of the GPU. See there for the contract of each method.

    Host memory goes into the same file by POSIX calls, which are faster for it. Kernels and copies that use a GPU block
    must have ended before the call. If cuFile fails to move a block, it goes through host memory, to the same place in
    the file; after three failures in a row, all blocks do.

    Parameters
    ----------
    directory
        Where to make the file.
    mode
        How GPU memory goes.
    direct
        Which blocks go through cuFile: by default those in GPU memory.

    Raises
    ------
    StoreError
        If no file can be made there, or cuFile does not take it and `mode` is not ``"auto"``.
    """

    device_memory = True

    def __init__(self, directory: Path, *, mode: Mode, direct: Callable[[torch.Tensor], bool] = _in_gpu_memory) -> None:
        self._posix = PosixFile(directory, named=True)
        self.path = self._posix.path
        self._takes = direct
        self._bounce = Bounce()
        self._lock = threading.Lock()  # guards the three numbers
        self._in_a_row = 0
        self.failures = self.bounced = 0
        self._cufile: Any = None
        self._opened: tuple[int, ...] = ()
        try:
            self._cufile = self._open_cufile(mode)
        except (RuntimeError, OSError, ImportError, TiersError) as error:
            if mode != "auto":
                self._posix.close()
                raise StoreError(self.path, 0, 0, "open a file for cuFile in", str(error)) from error
            self._tell(str(error))
        self._posix.forget_name()
        self._retired = self._cufile is None
        self._opened = _other_descriptors(self._posix.fileno())
        _open.add(self)

    @property
    def goes_direct(self) -> bool:
        """Whether cuFile is still called."""
        return not self._retired

    def grow(self, size: int) -> None:  # noqa: D102
        self._posix.grow(size)

    def pread(self, block: torch.Tensor, offset: int) -> int:  # noqa: D102
        if self._is_gone() or not self._takes(block):
            return self._posix.pread(block, offset)
        if (count := self._directly("raw_read", block, offset)) is not None:
            return count
        with self._bounce.lend(block) as buffer:
            count = self._posix.pread(buffer.memory[: block.numel()], offset)
            buffer.copy(block[:count], buffer.memory[:count])
        return self._note_bounced(count)

    def pwrite(self, block: torch.Tensor, offset: int) -> int:  # noqa: D102
        if self._is_gone() or not self._takes(block):
            return self._posix.pwrite(block, offset)
        if (count := self._directly("raw_write", block, offset)) is not None:
            return count
        with self._bounce.lend(block) as buffer:
            memory = buffer.memory[: block.numel()]
            buffer.copy(memory, block)
            return self._note_bounced(self._posix.pwrite(memory, offset))

    def close(self) -> None:
        """Free the file's space. Idempotent; in the child of a fork cuFile is not called."""
        self._opened = ()
        self._retired = True
        cufile, self._cufile = self._cufile, None
        if cufile is not None:
            cufile.close()
        self._posix.close()

    def abandon(self) -> None:
        """Close the file in the child of a fork, where cuFile must not be called: its descriptors lead nowhere then."""
        self._retired = True
        if self._cufile is not None:  # its end would call cuFile, so there is none
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._cufile))
            self._cufile = None
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for number in self._opened:
            os.dup2(nothing, number, inheritable=False)
        os.close(nothing)

    def _open_cufile(self, mode: Mode) -> Any:
        begin()
        import kvikio
        import kvikio.defaults

        if mode == "auto" and kvikio.defaults.is_compat_mode_preferred():
            log.info("GPU memory goes to %s through host memory: kvikio is in compatibility mode", self.path)
            return None
        name = str(self._posix.name)
        if mode != "compat":
            return Handle(name)
        with compat_mode("ON"):
            return kvikio.CuFile(name, "r+")

    def _is_gone(self) -> bool:
        return self._posix.fileno() < 0  # closed, here or by a fork: to read or write says so

    def _directly(self, name: str, block: torch.Tensor, offset: int) -> int | None:
        """Have cuFile move `block`; returns the bytes moved, or None if that failed."""
        if self._retired:
            return None
        size = block.numel()
        base, start = base_of(block)
        try:
            with in_context(block):
                count = int(getattr(self._cufile, name)(base, size, offset, start))
        except Exception as error:  # of any kind: there is another way
            self._failed(str(error))
            return None
        if not min(size, BLOCK) <= count <= size:  # less than a block of the drive is no progress
            self._failed(f"{count} of {size} bytes were transferred")
            return None
        with self._lock:
            self._in_a_row = 0
        return count

    def _note_bounced(self, count: int) -> int:
        with self._lock:
            self.bounced += count
        return count

    def _failed(self, reason: str) -> None:
        with self._lock:
            self.failures += 1
            self._in_a_row += 1
            last = self._in_a_row >= _ENOUGH and not self._retired
            self._retired |= last
        self._tell(reason)
        if last:
            log.info("GPUDirect Storage at %s is not tried any more: it failed %d times in a row", self.path, _ENOUGH)

    def _tell(self, reason: str) -> None:
        if self.path not in _said:
            _said.add(self.path)
            text = "GPUDirect Storage at %s failed (%s): what is left goes through host memory"
            log.warning(text, self.path, reason)


def _other_descriptors(fd: int) -> tuple[int, ...]:
    """All others of this process for the same file."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the listing is closed by now
            if int(name) != fd and os.path.sameopenfile(int(name), fd):
                found.append(int(name))
    return tuple(found)


_open: weakref.WeakSet[KvikioFile] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for file in list(_open):
        file.abandon()


os.register_at_fork(after_in_child=_after_fork_in_child)
