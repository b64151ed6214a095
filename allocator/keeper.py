"""The thread that looks after something in the background, as long as there is something to look after."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import suppress


class Keeper:
    """Calls `tend` when woken, and again after as many seconds as it says. It starts with the first `wake`.

    Parameters
    ----------
    tend
        A bound method; None ends the keeper. It is referred to weakly: the keeper ends with its owner.
    """

    def __init__(self, tend: Callable[[], float | None]) -> None:
        self._tend = weakref.WeakMethod(tend)
        self._woken = threading.Event()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def wake(self) -> None:
        """Have `tend` called soon."""
        self._woken.set()
        with self._starting:
            if self._thread is None:
                # A daemon: a program that ends without closing its arena must not wait for it.
                run = (self._tend, self._woken)
                thread = threading.Thread(target=_run, args=run, name="tiers-keeper", daemon=True)
                with suppress(RuntimeError):  # no thread can be had: it is tried again when there is more to do
                    thread.start()
                    self._thread = thread

    def join(self) -> None:
        """Wait until it has ended; `tend` returns None from now on."""
        self._woken.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()


def _run(tend: weakref.WeakMethod[Callable[[], float | None]], woken: threading.Event) -> None:
    wait: float | None = 0.0  # it was started to be woken
    while wait is not None:
        woken.wait(wait)
        woken.clear()
        method = tend()
        wait = None if method is None else method()
        del method  # or its owner would live as long as this thread sleeps
