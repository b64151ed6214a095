"""Threads that run requests, reads before writes, and what a caller waits for."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future


class RequestPool:
    """Runs requests on `depth` threads: so many are in flight at most, the others wait in order of arrival.

    A waiting read goes before every waiting write: a read is needed now, a write only makes room for later.
    Requests do not raise: they report to a `Transfer`. `name` is what its threads are called.
    """

    def __init__(self, depth: int, name: str) -> None:
        self._arrived = threading.Condition()
        self._reads: deque[Callable[[], None]] = deque()
        self._writes: deque[Callable[[], None]] = deque()
        self._closing = False
        # Daemons: a program that ends without closing its store must not wait for these threads forever.
        self._threads = [
            threading.Thread(target=self._serve, name=f"tiers-{name}-{index}", daemon=True) for index in range(depth)
        ]
        for thread in self._threads:
            thread.start()

    def read(self, request: Callable[[], None]) -> None:
        """Queue a read."""
        self._submit(self._reads, request)

    def write(self, request: Callable[[], None]) -> None:
        """Queue a write."""
        self._submit(self._writes, request)

    def close(self) -> None:
        """Run what is queued and end the threads. Idempotent."""
        with self._arrived:
            self._closing = True
            self._arrived.notify_all()
        for thread in self._threads:
            thread.join()

    def _submit(self, queue: deque[Callable[[], None]], request: Callable[[], None]) -> None:
        with self._arrived:
            if not self._closing:
                queue.append(request)
                self._arrived.notify()
                return
        request()  # no thread is left to run it, and its caller waits for an answer

    def _serve(self) -> None:
        while True:
            with self._arrived:
                while not (queue := self._reads or self._writes):
                    if self._closing:
                        return
                    self._arrived.wait()
                request = queue.popleft()
            request()
            del request  # it holds the caller's memory, and this thread may now sleep for long


class Transfer:
    """One read or write of an extent. Its future resolves when the last of its parts is done, also after an error.

    Only then does nobody touch the memory any more, so only then may the caller use or free it.
    """

    def __init__(self, parts: int) -> None:
        self.future: Future[None] = Future()
        self.future.set_running_or_notify_cancel()  # a transfer under way cannot be cancelled
        self._lock = threading.Lock()
        self._left = parts
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
        if self._error is None:
            self.future.set_result(None)
        else:
            self.future.set_exception(self._error)
