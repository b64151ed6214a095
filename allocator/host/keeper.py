"""A background thread that calls one method again and again; the arena grows and shrinks its memory in it."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress

log = logging.getLogger("tiers")

AFTER_AN_ERROR = 0.5  # seconds until it is tried again


class Keeper:
    """Calls `tend` when woken, and again after as many seconds as it says. It starts with the first `wake`.

    An error of `tend` is logged once and does not end the thread: what it keeps has to be released some time.

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
        self._pid = 0  # of the process that has the thread
        self._over = False

    def wake(self) -> None:
        """Have `tend` called soon."""
        self._woken.set()
        with self._starting:
            if self._may_start():
                # A daemon: a program that ends without closing its arena must not wait for it.
                run = (self._tend, self._woken)
                thread = threading.Thread(target=_run, args=run, name="tiers-keeper", daemon=True)
                with suppress(RuntimeError):  # no thread can be had: it is tried again when there is more to do
                    thread.start()
                    self._thread, self._pid = thread, os.getpid()

    def _may_start(self) -> bool:
        if self._thread is None:
            return not self._over
        # In a forked child no thread is alive, but what the parent's looks after is not the child's.
        return not (self._over or self._thread.is_alive()) and self._pid == os.getpid()

    def join(self) -> None:
        """Wait until it has ended; `tend` returns None from now on."""
        self._over = True
        self._woken.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()


def _run(tend: weakref.WeakMethod[Callable[[], float | None]], woken: threading.Event) -> None:
    wait: float | None = 0.0  # it was started to be woken
    said = False
    while wait is not None:
        woken.wait(wait)
        woken.clear()
        method = tend()
        try:
            wait = None if method is None else method()
        except Exception as error:  # whatever it is: nobody else would look after it
            wait = AFTER_AN_ERROR
            if not said:
                said = True
                # As text: an error that a handler of the log keeps would keep the owner alive.
                log.warning("dram is looked after again in %.1f s: %s", wait, f"{type(error).__name__}: {error}")
        del method  # or its owner would live as long as this thread sleeps
