"""The thread that looks after something in the background, as long as there is something to look after."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable


class Keeper:
    """Calls `tend` when woken and every so often after that. It starts with the first `wake`.

    Parameters
    ----------
    tend
        A bound method; False ends the keeper. It is referred to weakly: the keeper ends with its owner.
    every
        Seconds between two calls.
    """

    def __init__(self, tend: Callable[[], bool], every: float) -> None:
        self._tend = weakref.WeakMethod(tend)
        self._every = every
        self._woken = threading.Event()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def wake(self) -> None:
        """Have `tend` called soon."""
        self._woken.set()
        with self._starting:
            if self._thread is None:
                # A daemon: a program that ends without closing its arena must not wait for it.
                run = (self._tend, self._woken, self._every)
                self._thread = threading.Thread(target=_run, args=run, name="tiers-keeper", daemon=True)
                self._thread.start()

    def join(self) -> None:
        """Wait until it has ended; `tend` returns False from now on."""
        self._woken.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()


def _run(tend: weakref.WeakMethod[Callable[[], bool]], woken: threading.Event, every: float) -> None:
    goes_on = True
    while goes_on:
        woken.wait(every)
        woken.clear()
        method = tend()
        goes_on = method is not None and method()
        del method  # or its owner would live as long as this thread sleeps
