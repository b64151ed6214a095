"""Closes what has threads before the interpreter exits.

A daemon thread that returns from C++ while the interpreter shuts down is ended at that point, within C++, and that
aborts the whole process: its last output and its exit code are lost. So what has such threads, and was left open, is
closed first. A session closes its own parts; this is for programs that use the parts alone.
"""

from __future__ import annotations

import atexit
import logging
import os
import weakref
from typing import Protocol

log = logging.getLogger("tiers")


class Closable(Protocol):
    """Something with threads of its own."""

    def close(self) -> None:
        """End them. Idempotent."""


_open: weakref.WeakKeyDictionary[Closable, int] = weakref.WeakKeyDictionary()  # and the process that opened it


def close_at_exit(resource: Closable) -> None:
    """Have `resource` closed when the interpreter ends, unless it is gone by then."""
    _open[resource] = os.getpid()


@atexit.register
def _close_all() -> None:
    for resource, pid in list(_open.items()):
        if pid != os.getpid():  # a forked child has none of the threads
            continue
        try:
            resource.close()
        except Exception:  # the others are to be closed all the same
            log.exception("%s cannot be closed", type(resource).__name__)
