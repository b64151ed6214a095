"""What is left to do when SIGTERM ends the program, as schedulers do: by default nothing of it would run any more."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType


class BeforeSigterm:
    """Does something, and then lets SIGTERM end the process as if nobody had looked.

    The signal stays the program's: where it has a handler of its own, before or after, ours is out of the way. As every
    handler in Python, ours comes when the main thread is next in the interpreter, not while a library holds it.

    Parameters
    ----------
    act : callable
        What is to be done, in the main thread, wherever that is: it must take no lock that others of ours hold.
    """

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act
        self._pid = os.getpid()
        self._cleared = False

    def set(self) -> None:
        """From now on do it; only the main thread can say so, and only where the program leaves the signal alone."""
        if _in_main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._handle)

    def clear(self) -> None:
        """Do it no more. Idempotent."""
        self._cleared = True  # in another thread than the main one that is all that can be done
        if _in_main_thread() and signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        try:
            if os.getpid() == self._pid and not self._cleared:
                self._act()
        finally:  # by the signal, which the exit status is to tell, and not by an exception that the program may catch
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _after_fork_in_child() -> None:
    # Who ends a child must not wait until it is back in the interpreter.
    ours = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    if isinstance(ours, BeforeSigterm):
        ours.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
