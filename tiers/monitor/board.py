"""Where running programs show their monitor's state: a small file each, in a directory of this user's alone.

A file is locked by its process as long as that lives, so what can be locked is left over, and removed. Directories are
opened, looked at, and used through what was opened: by its path each could be another's a moment later.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch_tiers.allocator.private import open_file, opened

PREFIX = "monitor-"
_NEW = f"new-{PREFIX}"  # what nobody looks for until it is locked, as what is not locked is taken to be left over
_LEFT_OVER = 60.0  # seconds after which one that is not locked is so, too


class Board:
    """The file of this process, made at the first `write`.

    Parameters
    ----------
    places
        Directories; the first that serves is taken. One that is not there is made, if its parent is.
    """

    def __init__(self, *places: Path) -> None:
        self._places = places
        self._name = f"{PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
        self._directory: Path | None = None
        self._file: int | None = None
        self._removed = False
        _boards.add(self)

    def write(self, state: Mapping[str, Any]) -> None:
        """Replace what is shown. OSError if that cannot be done."""
        if self._file is not None and not os.fstat(self._file).st_nlink and not self._removed:
            self.leave()  # removed under our feet, as logind does with a user's directory at the last logout
        if self._file is None:
            self._file = self._make()
        data = json.dumps(state).encode()
        os.pwrite(self._file, data, 0)
        os.ftruncate(self._file, len(data))

    def _make(self) -> int:
        failure: OSError | None = None
        for place in self._places:
            try:
                return self._make_in(place)
            except OSError as error:
                failure = failure or error
        raise failure or FileNotFoundError("no directory is given")

    def _make_in(self, place: Path) -> int:
        with opened(place, make=True) as directory:
            _read_all(directory)  # removes what the dead have left
            new = _NEW + self._name.removeprefix(PREFIX)
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            file = os.open(new, flags, 0o600, dir_fd=directory)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.rename(new, self._name, src_dir_fd=directory, dst_dir_fd=directory)
            except OSError:
                os.close(file)
                with suppress(OSError):
                    os.unlink(new, dir_fd=directory)
                raise
        self._directory = place
        return file

    def close(self) -> None:
        """Take the file away. Idempotent; by the thread that writes."""
        if self._file is not None:
            self.remove()
            self.leave()

    def remove(self) -> None:
        """Take it from the sight of others, from any thread."""
        self._removed = True
        if self._directory is not None:
            with suppress(OSError), opened(self._directory) as directory:
                os.unlink(self._name, dir_fd=directory)

    def leave(self) -> None:
        """Close the file and leave it: in the child of a fork it is the parent's."""
        file, self._file = self._file, None  # at once: closed twice, the number may be somebody else's
        if file is not None:
            os.close(file)


_boards: weakref.WeakSet[Board] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for board in list(_boards):
        board.leave()


os.register_at_fork(after_in_child=_after_fork_in_child)


def read_all(place: Path) -> list[dict[str, Any]]:
    """The states of all programs of this user that are running now, by process id; none where `place` is not there.

    Raises
    ------
    PermissionError
        If `place` is not this user's alone: what is in it may be anybody's.
    """
    try:
        with opened(place) as directory:
            return _read_all(directory)
    except PermissionError:
        raise
    except OSError:  # not there, or no directory, which a symbolic link is not either
        return []


def _read_all(directory: int) -> list[dict[str, Any]]:
    states = []
    for name in sorted(os.listdir(directory)):
        if not name.startswith((PREFIX, _NEW)):
            continue
        with suppress(OSError):  # gone since it was listed, or no file of ours
            file = open_file(name, directory)
            is_new = name.startswith(_NEW)
            try:
                if is_new and time.time() - os.fstat(file).st_mtime < _LEFT_OVER:
                    continue  # its process may be about to lock it
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(name, dir_fd=directory)
            except BlockingIOError:
                state = None if is_new else _read(file)
                if state is not None:
                    states.append(state)
            finally:
                os.close(file)
    return sorted(states, key=lambda state: state.get("pid", 0))


def _read(file: int) -> dict[str, Any] | None:
    """One state; a second look where the first met a write half done."""
    for _ in range(3):
        with suppress(ValueError):
            state = json.loads(os.pread(file, 1 << 20, 0))
            return state if isinstance(state, dict) else None
    return None
