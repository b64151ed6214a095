"""Directories and files that belong to this user alone: nobody else can have made them, or may change them.

In directories that all users share, such as /tmp, anybody may make the file that we look for, before we do.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

WRITABLE = stat.S_IWGRP | stat.S_IWOTH
"""Mode bits that let others write."""
ACCESSIBLE = stat.S_IRWXG | stat.S_IRWXO
"""Mode bits that let others do anything."""


def is_ours(found: os.stat_result, denied: int = WRITABLE) -> bool:
    """Whether what `os.stat` found belongs to this user, and its mode gives nobody else any right of `denied`."""
    return found.st_uid == os.geteuid() and not found.st_mode & denied


def make_directory(path: Path) -> Path:
    """Make `path`, and the directories above it, for this user alone, if it does not exist. OSError if that fails."""
    if not path.is_dir():
        make_directory(path.parent)
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
    return path


@contextmanager
def opened(path: Path, *, make: bool = False, denied: int = WRITABLE) -> Iterator[int]:
    """Open a directory of this user's; its descriptor is for looking at and changing what is in it.

    Parameters
    ----------
    path
        No symbolic link, which could lead into somebody else's directory.
    make
        Whether to make it, for this user alone, if it is not there.
    denied
        Rights that nobody else may have there.

    Raises
    ------
    OSError
        If it cannot be opened (PermissionError: it is not private to this user).
    """
    if make:
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not is_ours(os.fstat(directory), denied):
            raise PermissionError(errno.EPERM, "is not private to this user", str(path))
        yield directory
    finally:
        os.close(directory)


def open_file(name: str, directory: int) -> int:
    """Open a file of this user's in `directory` to read and write; OSError if that is something else."""
    # A fifo would have us wait, and a device do whatever it does when it is opened, were it not for these flags.
    file = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, dir_fd=directory)
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode) or not is_ours(found):
        os.close(file)
        raise PermissionError(errno.EPERM, "is no file of this user's", name)
    return file
