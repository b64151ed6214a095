"""What must end before the interpreter does.

A daemon thread that comes back from C++ while the interpreter goes down is ended there and then, and an end within C++
takes the whole process along: ``abort``, with everything it had to say and its exit code. So whoever has such threads,
and may have been left open, is closed first. A session closes its own; this is for programs that use the parts alone.
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
