"""Raises the threshold of Python's garbage collector by the objects that the hooks hold.

Each saved tensor takes some Python objects, thousands in a step. None of them is ever garbage of the collector's kind:
they die by reference count, with the graph. But it runs when enough objects are alive, and looks at all that are young:
ten times in a step of a ResNet-152, and now and then at everything there is, for 150 ms. So its threshold is raised by
what the hooks hold. What the program itself leaves behind is collected as often as it ever was.
"""

from __future__ import annotations

import gc
import threading
import weakref

KEPT, MOVED, MADE = 2, 7, 11
"""Objects a saved tensor takes that stays, that moves, and that is recomputed; counted in CPython 3.11."""


class Allowance:
    """Objects that the collector is to allow the hooks, on top of the program's own threshold."""

    def __init__(self) -> None:
        self._given = self._set = gc.get_threshold()
        self._held: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
        self._closed = False
        self._lock = threading.Lock()

    def hold(self, owner: object, objects: int) -> None:
        """From now on `owner` holds so many objects at once."""
        with self._lock:
            self._held[owner] = objects
            # A threshold of 0 switches the collector off; and one that the program has set since is the program's.
            if self._given[0] and not self._closed and gc.get_threshold() == self._set:
                self._set = (self._given[0] + sum(self._held.values()), *self._given[1:])
                gc.set_threshold(*self._set)

    def close(self) -> None:
        """Put the program's threshold back, unless it has set one itself. Idempotent."""
        if not self._closed and gc.get_threshold() == self._set:
            gc.set_threshold(*self._given)
        self._closed = True
