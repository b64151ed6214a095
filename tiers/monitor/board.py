"""Where running programs show their monitor's state: a small file each, in the node ledger's directory.

A file is locked by its process as long as that lives, so what can be locked is left over, and removed.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

PREFIX = "monitor-"
_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC


class Board:
    """The file of this process, made at the first `write`.

    Parameters
    ----------
    directory
        Private to the user.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / f"{PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
        self._file: int | None = None
        _boards.add(self)

    def write(self, state: Mapping[str, Any]) -> None:
        """Replace what is shown. OSError if that cannot be done."""
        if self._file is None:
            self._file = self._make()
        data = json.dumps(state).encode()
        os.pwrite(self._file, data, 0)
        os.ftruncate(self._file, len(data))

    def _make(self) -> int:
        read_all(self._path.parent)  # removes what the dead have left
        # Under a name that nobody looks for until it is locked: what is not locked is taken to be left over.
        new = self._path.with_name(f"new-{self._path.name}")
        file = os.open(new, _FLAGS | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.rename(new, self._path)
        return file

    def close(self) -> None:
        """Take the file away. Idempotent; by the thread that writes."""
        if self._file is not None:
            self.hide()
            self.let_go()

    def hide(self) -> None:
        """Take it from the sight of others, from any thread."""
        with suppress(OSError):
            self._path.unlink()

    def let_go(self) -> None:
        """Close the file and leave it: in the child of a fork it is the parent's."""
        file, self._file = self._file, None  # at once: closed twice, the number may be somebody else's
        if file is not None:
            os.close(file)


_boards: weakref.WeakSet[Board] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for board in list(_boards):
        board.let_go()


os.register_at_fork(after_in_child=_after_fork_in_child)


def read_all(directory: Path) -> list[dict[str, Any]]:
    """The states of all programs of this user that are running now, by process id."""
    states = []
    for path in sorted(directory.glob(f"{PREFIX}*")):
        with suppress(OSError):  # gone since it was listed
            file = os.open(path, _FLAGS)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            except BlockingIOError:
                state = _read(file)
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
