"""Notices a drive that does not answer, and logs it: a request that hangs in the kernel cannot be ended."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch_tiers.allocator.sizes import format_size

log = logging.getLogger("tiers")

PATIENCE = 5.0
"""Seconds: no drive that works takes as long for a request."""
_LOOK = 1.0  # seconds between two looks


@dataclass(frozen=True, slots=True)
class _Note:
    begin: float
    action: str
    path: str
    nbytes: int


class Watch:
    """Says, once for each directory, that a request is not over after `PATIENCE`. Thread-safe.

    A thread that uses a drive notes the time before, and removes the note afterwards; a request pays no more than that.
    One more thread looks at the notes every second.
    """

    def __init__(self) -> None:
        self._under_way: dict[int, _Note] = {}  # by thread
        self._said: set[str] = set()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look_on, name="tiers-nvme-watch", daemon=True)
        self._thread.start()

    @contextmanager
    def watched(self, action: str, path: str, nbytes: int) -> Iterator[None]:
        """Watch what this thread does inside."""
        me = threading.get_ident()
        self._under_way[me] = _Note(time.monotonic(), action, path, nbytes)
        try:
            yield
        finally:
            del self._under_way[me]

    def stuck(self, thread: threading.Thread | None = None) -> bool:
        """Whether a request has been under way for too long: that of `thread`, or any."""
        return any(thread is None or ident == thread.ident for ident, _, _ in self._overdue())

    def close(self) -> None:
        """Look for the last time. Idempotent."""
        self._ended.set()
        self._thread.join()

    def _look_on(self) -> None:
        ended = False
        while not ended:
            ended = self._ended.wait(_LOOK)
            self._look()

    def _look(self) -> None:
        for _, note, age in self._overdue():
            if note.path not in self._said:
                self._said.add(note.path)
                log.warning(
                    "nvme at %s does not answer: a %s of %s, begun %.0f s ago, is not over, and what needs it waits; "
                    "look at dmesg and at the drive, or interrupt the program and name another directory "
                    "(TIERS_NVME_PATH)",
                    note.path,
                    note.action,
                    format_size(note.nbytes),
                    age,
                )

    def _overdue(self) -> list[tuple[int, _Note, float]]:
        now = time.monotonic()
        notes = self._under_way.copy().items()  # in one go: other threads add and remove
        return [(ident, note, now - note.begin) for ident, note in notes if now - note.begin > PATIENCE]
