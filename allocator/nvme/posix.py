"""A file moved by preadv and pwritev, past the page cache where the filesystem allows that."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
import weakref
from contextlib import suppress
from pathlib import Path

import torch

from torch_tiers.allocator.errors import StoreError

log = logging.getLogger("tiers")

_FLAGS = os.O_RDWR | os.O_EXCL | os.O_CLOEXEC
_NO_UNNAMED_FILES = {errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL}
"""What filesystems and kernels without O_TMPFILE answer to it."""
_NO_FALLOCATE = {errno.EOPNOTSUPP, errno.EINVAL}
"""The same without fallocate: the C library writes a byte to each block instead, and with O_DIRECT that is EINVAL."""

_said: set[str] = set()  # directories whose page cache has been spoken of


class PosixFile:
    """A `Backend` for memory of the host. See there for the contract of each method.

    Parameters
    ----------
    directory
        Where to make the file: mode 0600 and without a name, so that no crash leaves it behind. A forked child does
        not have it: one that outlives its parent would keep the space.
    named
        Give it a name until `forget_name`, for those who open it by that.

    Raises
    ------
    StoreError
        If no file can be made there.
    """

    device_memory = False
    bounced = 0

    def __init__(self, directory: Path, *, named: bool = False) -> None:
        self.path = str(directory)
        self._size = 0
        self.name: Path | None = None
        try:
            if named:
                self._fd, self.name = _open_named(directory)
            else:
                self._fd = _open_unnamed(directory)
        except OSError as error:
            reason = error.strerror or str(error)
            raise StoreError(self.path, 0, 0, "make a file in", reason) from error
        _open.add(self)
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) | os.O_DIRECT)
        except OSError as error:  # tmpfs, for one
            if self.path not in _said:
                _said.add(self.path)
                text = "nvme at %s goes through the page cache: O_DIRECT: %s; ext4 or xfs need not (TIERS_NVME_PATH)"
                log.warning(text, self.path, error.strerror)

    def forget_name(self) -> None:
        """Have the file gone with its last descriptor. Idempotent."""
        name, self.name = self.name, None
        if name is not None:
            with suppress(FileNotFoundError):
                os.unlink(name)

    def fileno(self) -> int:
        """Return the descriptor of the open file."""
        return self._fd

    def grow(self, size: int) -> None:  # noqa: D102
        _allocate(self._fd, self._size, size)
        self._size = size

    def pread(self, block: torch.Tensor, offset: int) -> int:  # noqa: D102
        if self._fd < 0:
            raise self._closed(block, offset)
        return os.preadv(self._fd, [block.numpy().data], offset)

    def pwrite(self, block: torch.Tensor, offset: int) -> int:  # noqa: D102
        if self._fd < 0:
            raise self._closed(block, offset)
        return os.pwritev(self._fd, [block.numpy().data], offset)

    def close(self) -> None:
        """Free the file's space; in a forked child, close its descriptor. Idempotent."""
        self.forget_name()
        fd, self._fd = self._fd, -1  # the number may be somebody else's after the first close
        if fd >= 0:
            os.close(fd)

    def _closed(self, block: torch.Tensor, offset: int) -> StoreError:
        reason = "the file is closed, as it is in a forked process"
        return StoreError(self.path, offset, block.numel(), "transfer", reason)


_open: weakref.WeakSet[PosixFile] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for file in list(_open):
        file.close()


os.register_at_fork(after_in_child=_after_fork_in_child)


def _open_unnamed(directory: Path) -> int:
    try:
        return os.open(directory, _FLAGS | os.O_TMPFILE, 0o600)
    except OSError as error:
        if error.errno not in _NO_UNNAMED_FILES:
            raise
    fd, name = _open_named(directory)
    os.unlink(name)
    return fd


def _open_named(directory: Path) -> tuple[int, Path]:
    name = directory / f".tiers-{os.getpid()}-{secrets.token_hex(8)}"
    return os.open(name, _FLAGS | os.O_CREAT, 0o600), name


def _allocate(fd: int, start: int, end: int) -> None:
    """Allocate on disk from `start` to `end`; where the filesystem cannot, only make the file that long."""
    try:
        os.posix_fallocate(fd, start, end - start)
        return
    except OSError as error:
        if error.errno not in _NO_FALLOCATE:
            raise
    # ext3, NFS before 4.2: through the page cache the C library's way works, if slowly. Opened anew, as the flags of
    # `fd` are for all of its transfers; for reading, too, as what an earlier try has allocated is looked at.
    with suppress(FileNotFoundError, PermissionError):  # no /proc
        cached = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            os.posix_fallocate(cached, start, end - start)
            return
        except OSError as error:
            if error.errno not in _NO_FALLOCATE:
                raise
        finally:
            os.close(cached)
    os.ftruncate(fd, end)  # a disk that is full shows at a write
