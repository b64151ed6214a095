"""A file that GPU memory goes to and comes from through cuFile. kvikio is imported when one is made."""

from __future__ import annotations

import errno
import os
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Literal

import torch

from torch_tiers.allocator.errors import StoreError
from torch_tiers.allocator.nvme.posix import PosixFile

Mode = Literal["gds", "auto", "compat"]
"""Nothing but GPUDirect Storage; that where it serves and kvikio's bounce buffers elsewhere; those alone."""

_COMPAT_MODES = {"gds": "OFF", "auto": "AUTO", "compat": "ON"}


def kvikio_refusal() -> str | None:
    """Say why kvikio cannot be used here, or return None."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    try:
        import kvikio  # noqa: F401
    except ImportError as error:
        return f"kvikio cannot be imported: {error}"
    return None


def gds_refusal() -> str | None:
    """Say why GPUDirect Storage cannot be used here, or return None."""
    if reason := kvikio_refusal():
        return reason
    import kvikio.cufile_driver

    try:
        available = kvikio.cufile_driver.get("is_gds_available")
    except RuntimeError as error:
        return f"cuFile does not start: {error}"
    return None if available else "the nvidia-fs driver is not loaded"


class KvikioFile:
    """A `Backend` for memory of the host and of the GPU. See there for the contract of each method.

    Host memory takes the plain POSIX way into the same file, which is the faster one. kvikio orders its work
    only against the default stream: what else fills or reads a GPU block must have ended before the call.

    Parameters
    ----------
    directory
        Where to make the file.
    mode
        How GPU memory goes.

    Raises
    ------
    StoreError
        If no file can be made there, or `mode` is ``"gds"`` and the drive cannot do it.
    """

    device_memory = True

    def __init__(self, directory: Path, *, mode: Mode) -> None:
        import kvikio
        import kvikio.defaults

        self._posix = PosixFile(directory)
        self.path = self._posix.path
        try:
            with kvikio.defaults.set("compat_mode", getattr(kvikio.CompatMode, _COMPAT_MODES[mode])):
                # The file has no name, so kvikio, which opens by name, gets the one of our descriptor.
                self._cufile = kvikio.CuFile(f"/proc/self/fd/{self._posix.fileno()}", "r+")
        except RuntimeError as error:  # cuFile refuses this filesystem or drive
            self._posix.close()
            raise StoreError(self.path, 0, 0, "open a file for cuFile in", str(error)) from error
        self._opened = _other_descriptors(self._posix.fileno())
        _open.add(self)

    def grow(self, size: int) -> None:  # noqa: D102
        self._posix.grow(size)

    def pread(self, block: torch.Tensor, offset: int) -> int:  # noqa: D102
        if not block.is_cuda:
            return self._posix.pread(block, offset)
        try:
            return int(self._cufile.read(block, block.numel(), offset))
        except RuntimeError as error:
            raise OSError(errno.EIO, str(error)) from error

    def pwrite(self, block: torch.Tensor, offset: int) -> int:  # noqa: D102
        if not block.is_cuda:
            return self._posix.pwrite(block, offset)
        try:
            return int(self._cufile.write(block, block.numel(), offset))
        except RuntimeError as error:
            raise OSError(errno.EIO, str(error)) from error

    def close(self) -> None:  # noqa: D102
        self._opened = ()
        self._cufile.close()
        self._posix.close()

    def let_go(self) -> None:
        """Let go of the file's space in the child of a fork, where cuFile must not be called and closes its numbers."""
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for number in self._opened:
            os.dup2(nothing, number, inheritable=False)
        os.close(nothing)


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
        file.let_go()


os.register_at_fork(after_in_child=_after_fork_in_child)
