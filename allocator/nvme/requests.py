"""Runs reads and writes in threads, reads first (`RequestPool`), and joins the parts of a transfer (`Transfer`)."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

Rest = Callable[[], object]
Request = Callable[[], "Rest | None"]
"""Uses a drive, and returns what is left to do without it."""

_LOOK = 0.1  # seconds, at a thread that does not end
# Seconds after which a thread looks for requests by itself: Ctrl-C may interrupt who is to wake it.
_LOST = 1.0


class RequestPool:
    """Runs requests: at most `depth` at once are on the drives, the others wait in order of arrival.

    A waiting read goes before every waiting write: a read is needed now, a write only makes room for later. When a
    request has left the drive, its thread goes on with what is left of it, such as its checksum, as it is awake and has
    the data in its caches; meanwhile one of the `helpers` takes its place at the drives. Helpers also do work that
    needs no drive. Requests do not raise: they report to a `Transfer`. `name` is the name of the threads.
    """

    def __init__(self, depth: int, helpers: int, name: str) -> None:
        self._changed = threading.Condition()
        self._reads: deque[Request] = deque()
        self._writes: deque[Request] = deque()
        self._beside: deque[Request] = deque()
        self._places = depth  # on the drives, that are free
        self._helpers = helpers  # that may do what needs no drive: the other threads are for what does
        self._closing = False
        # Daemons: a program that ends without closing its store must not wait for these threads forever.
        self._threads: list[threading.Thread] = []
        try:
            for index in range(depth + helpers):
                thread = threading.Thread(target=self._serve, name=f"tiers-{name}-{index}", daemon=True)
                thread.start()
                self._threads.append(thread)
        except BaseException:  # no more threads can be had: those that there are would wait for ever
            self.close()
            raise

    def read(self, request: Request) -> None:
        """Queue a read."""
        self._submit(self._reads, request)

    def write(self, request: Request) -> None:
        """Queue a write."""
        self._submit(self._writes, request)

    def beside(self, request: Request) -> None:
        """Queue work that needs no drive."""
        self._submit(self._beside, request)

    def close(self, stuck: Callable[[threading.Thread], bool] = lambda thread: False) -> bool:
        """Run what is queued and end the threads, but for those that are `stuck`. Idempotent.

        Returns
        -------
        bool
            Whether all have ended; the others may still use what their requests were given.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            while thread.is_alive() and not stuck(thread):
                thread.join(_LOOK)
        return not any(thread.is_alive() for thread in self._threads)

    def _submit(self, queue: deque[Request], request: Request) -> None:
        with self._changed:
            if not self._closing:
                queue.append(request)
                self._changed.notify()
                return
        if rest := request():  # no thread is left to run it, and its caller waits for an answer
            rest()

    def _serve(self) -> None:
        while True:
            with self._changed:
                while (queue := self._next()) is None:
                    if self._closing:
                        return  # what still waits for a place is taken by who gives one up
                    self._changed.wait(_LOST)
                request = queue.popleft()
                beside = queue is self._beside
                self._take(beside, -1)
            rest = request()
            with self._changed:
                self._take(beside, 1)
                if rest is not None and (self._reads or self._writes):
                    self._changed.notify()  # this thread has other things to do
            if rest is not None:
                rest()
            del request, rest  # they hold the caller's memory, and this thread may now sleep for long

    def _next(self) -> deque[Request] | None:
        return (self._places and (self._reads or self._writes)) or (self._helpers and self._beside) or None

    def _take(self, beside: bool, change: int) -> None:
        if beside:
            self._helpers += change
        else:
            self._places += change


class Transfer:
    """One read or write of an extent. Its future resolves when the last of its parts is done, also after an error.

    Only then does nobody touch the memory any more, so only then may the caller use or free it. Right before, `ended`
    is called with the first error.
    """

    def __init__(self, parts: int, ended: Callable[[Exception | None], None] = lambda error: None) -> None:
        self.future: Future[None] = Future()
        self.future.set_running_or_notify_cancel()  # a transfer under way cannot be cancelled
        self._lock = threading.Lock()
        self._left = parts
        self._ended = ended
        self._error: Exception | None = None

    @property
    def failed(self) -> bool:
        """Whether a part has failed, so that the others need not be tried."""
        return self._error is not None

    def part_done(self, error: Exception | None) -> None:
        """Count one part; `error` is what went wrong with it."""
        with self._lock:
            self._left -= 1
            self._error = self._error or error
            last = not self._left
        if not last:
            return
        try:
            self._ended(self._error)
        except Exception as raised:  # such as by a handler of the program's log: who waits would wait for ever
            self._error = self._error or raised
        if self._error is None:
            self.future.set_result(None)
        else:
            self.future.set_exception(self._error)
