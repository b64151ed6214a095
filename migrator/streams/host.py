"""Compute and lanes without a GPU: host memory plays HBM, and a lane is a thread."""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress

import torch

from torch_tiers.migrator.streams import TIMED, Event, OperatorClock, Stream
from torch_tiers.migrator.streams.meter import HostMeter
from torch_tiers.migrator.streams.pieces import Piece, at_full_speed
from torch_tiers.migrator.telemetry.counters import Counters
from torch_tiers.migrator.telemetry.transfers import Transfer


class HostEvent:
    """Passed when set; carries the error of the work it stands for."""

    def __init__(self) -> None:
        self._passed = threading.Event()
        self._error: BaseException | None = None

    def query(self) -> bool:
        return self._passed.is_set()

    def synchronize(self) -> None:
        self._passed.wait()
        if self._error is not None:
            raise self._error

    def set(self, error: BaseException | None = None) -> None:
        """Let everybody pass, or fail with `error`."""
        self._error = error
        self._passed.set()


class HostCompute:
    """A program on the CPU: whatever it asked for has happened when the call returns.

    Attributes
    ----------
    static : int
        Bytes of weights, gradients and optimizer state, as far as they were seen: nobody else counts
        the memory of a program on the CPU.
    """

    device = torch.device("cpu")
    counts = False
    operators: OperatorClock | None = None  # the host's clock tells what they take

    def __init__(self, counters: Counters) -> None:
        self.static = 0
        self._highest = 0
        self._counters = counters
        self._now = HostEvent()
        self._now.set()

    def empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def mark(self, stream: Stream) -> HostEvent:
        return self._now

    def wait(self, event: Event, cause: str, stream: Stream) -> None:
        if not event.query():
            with self._counters.waiting(cause):
                event.synchronize()
        else:
            event.synchronize()  # raises what the copy raised

    def time_waits(self, iterations: int) -> None:
        """To look at the clock costs nothing here."""

    def stream(self) -> Stream:
        return None

    def outlast(self, event: Event, stream: Stream) -> None:
        """The lane itself holds what it still reads."""

    def hand_over(self, buffer: torch.Tensor) -> None:
        """One stream: nothing to tell."""

    def untracked(self) -> AbstractContextManager[None]:
        """Whoever asks gets the host's own memory."""
        return nullcontext()

    def capturing(self) -> bool:
        return False

    def settle(self) -> None:
        """Waits were counted when they happened; and recordings have the clock of all iterations, the host's."""
        if (timeline := self._counters.timeline) is not None:
            timeline.iteration(str(self.device), self._counters.iterations, time.perf_counter())

    def end_resting_iteration(self) -> None:
        """They were counted when they happened."""

    def when(self, event: Event, recorded: float) -> float:
        return 0.0  # what lanes tell here are times of that clock

    def close(self) -> None:
        """Nothing is left to add up."""

    def tidy(self) -> None:
        pass

    def renew(self) -> None:
        pass

    def allocated(self) -> int:
        return 0

    def idle(self) -> bool:
        return False  # there is no device besides the host

    def meter(self, *, held: bool = False) -> HostMeter:
        return HostMeter(self)

    def stalled(self) -> float:
        """Seconds that the host has waited so far."""
        return sum(stall.seconds for stall in self._counters.stalls.values())

    def peak(self, resident: int) -> int:
        self._highest = max(self._highest, self.static + resident)
        return self.static + resident

    def pass_by(self, *, counts: bool) -> None:
        pass  # nobody counts what else is in use

    def pressed(self) -> bool:
        return False

    def reserved(self) -> int:
        return self._highest


class HostLane:
    """A thread that copies. `bytes_per_second` slows it down to play a link of that speed."""

    def __init__(self, name: str, counters: Counters, bytes_per_second: float | None = None) -> None:
        self._name = name
        self._counters = counters
        self._speed = bytes_per_second
        self._over: deque[Transfer] = deque(maxlen=TIMED)
        self._closing = threading.Lock()
        self._closed = False
        self._jobs: queue.SimpleQueue[tuple[Sequence[Piece], Sequence[Event], HostEvent] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"tiers-{name}", daemon=True)
        self._thread.start()

    def copy(self, pieces: Iterable[Piece], after: Sequence[Event], behind: Stream = None) -> HostEvent:
        pieces, done = tuple(pieces), HostEvent()
        self._counters.moved[self._name] += sum(piece.nbytes for piece in pieces)
        with self._closing:
            if not self._closed:
                self._jobs.put((pieces, after, done))
                return done
        # A graph may outlive the session that saved its tensors: then whoever wants them copies himself.
        done.set(self._carry_out(pieces, after))
        return done

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            pieces, after, done = job
            # Before the event is set nothing here may refer to the tensors any more: whoever waits for
            # it may look at once whether their memory is free. (The next get blocks with them bound, too.)
            del job
            error = self._carry_out(pieces, after)
            del pieces, after
            done.set(error)
            del done

    def _carry_out(self, pieces: Sequence[Piece], after: Sequence[Event]) -> BaseException | None:
        try:
            for event in after:
                event.synchronize()
            begin = time.perf_counter()
            for target, at, source, start, nbytes in pieces:
                # Not torch's copy: torch would start a second pool of threads for this one. Nor numpy's: what it has
                # had in its hands may not be resized any more.
                ctypes.memmove(target.data_ptr() + at, source.data_ptr() + start, nbytes)
            if self._speed:
                time.sleep(sum(piece.nbytes for piece in pieces) / self._speed)
            if at_full_speed(pieces):
                end, total = time.perf_counter(), sum(piece.nbytes for piece in pieces)
                self._over.append(Transfer(self._name, total, begin, end))
        except BaseException as error:  # handed to whoever waits for the copy
            return error
        return None

    def over(self, since: Event) -> list[Transfer]:
        found: list[Transfer] = []
        with suppress(IndexError):  # no more: other threads ask, too
            while True:
                found.append(self._over.popleft())
        return found

    def close(self) -> None:
        with self._closing:
            if self._closed:
                return
            self._closed = True
            self._jobs.put(None)
        self._thread.join()
