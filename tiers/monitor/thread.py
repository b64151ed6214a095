"""The monitor beside the program: a thread that ticks when an iteration has ended, and the advisor that asks it."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from torch_tiers.migrator.runtime.backoff import Response
from torch_tiers.migrator.telemetry.now import Now
from torch_tiers.migrator.telemetry.transfers import Transfer
from torch_tiers.monitor.allowance import Allowance
from torch_tiers.monitor.board import Board
from torch_tiers.monitor.watch import Watch

log = logging.getLogger("tiers")

IDLE = 1.0  # seconds from one tick to the next while nothing happens: what `tiers top` shows is as old as that
PART = 0.01  # of one core that the thread may take, on average ...
ATONCE = 0.05  # ... and processor seconds of that at once
NAME = "tiers-monitor"  # of the thread
NOTHING = Now()  # before the first iteration
LOST = 10.0  # seconds without a tick after which nothing the thread said counts any more


class Monitor:
    """The runtime's advisor. Its thread starts with the first iteration; training does not depend on its fate.

    Parameters
    ----------
    board : Board, optional
        Where the state is shown.
    beside : callable
        Returns what else is shown of the run, as plain data. Called by the thread, once a second at most.
    """

    def __init__(
        self, watch: Watch, board: Board | None = None, beside: Callable[[], Mapping[str, Any]] = dict
    ) -> None:
        self.watch = watch
        self._board = board
        self._beside = beside
        self._now = NOTHING
        self._response = Response()
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._starting = threading.Lock()  # several threads may end their first iteration at once
        self._thread: threading.Thread | None = None
        self._beat = 0.0
        self._shown = float("-inf")
        self._pid = os.getpid()

    def iteration_over(self, transfers: Sequence[Transfer], moved: Mapping[str, int], now: Now = NOTHING) -> Response:
        """Hand an iteration over; what the thread has last said. Returns at once and never raises."""
        self._now = now
        if self._thread is None:
            with self._starting:
                if self._thread is None:
                    self._beat = time.monotonic()
                    self._thread = self._start()
        if not self._thread.is_alive() or time.monotonic() - self._beat > LOST:
            return Response()
        self.watch.feed(transfers, moved)
        self._wake.set()
        return self._response

    def _start(self) -> threading.Thread:
        thread = threading.Thread(target=self._run, name=NAME, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no thread can be had; one that was not started counts as dead
            log.warning("there is no monitor, training goes on without it: %s", error)
        return thread

    def close(self) -> None:
        """End the thread, and take the state away. Idempotent."""
        if os.getpid() != self._pid:
            return
        self._closing.set()
        self._wake.set()
        if self._thread is not None and self._thread.is_alive():
            self._thread.join(IDLE)
            if self._thread.is_alive() and self._board is not None:
                self._board.remove()

    def _run(self) -> None:
        allowance = Allowance(PART, ATONCE)
        try:
            while not self._closing.is_set():
                start = time.thread_time()
                self._wake.clear()
                self._response = self.watch.tick()
                self._show()
                self._beat = time.monotonic()
                self._closing.wait(min(allowance.take(time.thread_time() - start, self._beat), LOST / 2))
                self._wake.wait(IDLE)
        except Exception as error:
            log.warning("the monitor has ended, training goes on without it: %s: %s", type(error).__name__, error)
        finally:
            self._response = Response()
            if self._board is not None:
                self._board.close()

    def _show(self) -> None:
        now = time.monotonic()
        if self._board is None or now - self._shown < IDLE / 2:
            return
        self._shown = now
        program = " ".join(sys.argv)[:200]
        run = {**self._now._asdict(), **self._beside()}
        with suppress(OSError):  # nobody will see it; all else goes on
            self._board.write(
                {"pid": os.getpid(), "at": time.time(), "program": program, "run": run, **self.watch.state()}
            )
