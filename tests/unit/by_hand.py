"""Lanes, a compute stream and a store that do nothing until the test says so."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from torch_tiers.allocator.nvme.extent import NvmeExtent
from torch_tiers.allocator.sizes import KiB, round_up
from torch_tiers.migrator.streams import Event, Stream
from torch_tiers.migrator.streams.host import HostCompute, HostEvent
from torch_tiers.migrator.streams.meter import HostMeter
from torch_tiers.migrator.streams.pieces import Piece, flat
from torch_tiers.migrator.telemetry.counters import Counters


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 60  # of a machine that others use, too
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)
    return condition()


class HandLane:
    """A lane that copies when `run` is called. It fails a test that runs a copy before what it is to follow."""

    def __init__(self) -> None:
        self.jobs: deque[tuple[Sequence[Piece], Sequence[Event], HostEvent]] = deque()
        self.copies = 0
        self.followed: list[Stream] = []

    def copy(self, pieces: Iterable[Piece], after: Sequence[Event], behind: Stream = None) -> HostEvent:
        done = HostEvent()
        self.jobs.append((tuple(pieces), after, done))
        self.copies += 1
        self.followed.append(behind)
        return done

    def run(self) -> None:
        while self.jobs:
            pieces, after, done = self.jobs.popleft()
            assert all(event.query() for event in after)
            for target, at, source, start, nbytes in pieces:
                flat(target, at, nbytes).copy_(flat(source, start, nbytes))
            done.set()

    def close(self) -> None:
        self.run()


class StreamCompute(HostCompute):
    """Waits as a GPU's stream does: the host goes on. Remembers for what it waits, and on which stream."""

    def __init__(self) -> None:
        super().__init__(Counters())
        self.current = 1
        self.waits: list[tuple[Event, Stream]] = []
        self.stands_for: list[int] = []
        self.held: list[bool] = []
        self.tidied = 0
        self.outlasted: list[tuple[Event, Stream]] = []
        self.handed_over: list[tuple[torch.Tensor, int]] = []

    def wait(self, event: Event, cause: str, stream: Stream) -> None:
        self.waits.append((event, stream))

    def time_waits(self, iterations: int) -> None:
        self.stands_for.append(iterations)

    def meter(self, *, held: bool = False) -> HostMeter:
        self.held.append(held)
        return super().meter(held=held)

    def tidy(self) -> None:
        self.tidied += 1

    def outlast(self, event: Event, stream: Stream) -> None:
        self.outlasted.append((event, stream))

    def stream(self) -> int:
        return self.current

    def hand_over(self, buffer: torch.Tensor) -> None:
        self.handed_over.append((buffer, self.current))


def raising(error: type[BaseException], *arguments: object) -> Callable[..., Any]:
    """Stands for a function that fails so, whatever it is given."""

    def fail(*_: object, **__: object) -> Any:
        raise error(*arguments)

    return fail


class HandStore:
    """A store in memory whose transfers end when the test resolves them, or at once if `at_once`."""

    where = "/somewhere"
    directory = Path("/somewhere")
    stuck = False

    def __init__(self, capacity: int, *, at_once: bool = False) -> None:
        self.capacity = capacity
        self.used = 0
        self.writes: list[Future[None]] = []
        self.reads: list[Future[None]] = []
        self.at_once = at_once
        self._data: dict[NvmeExtent, torch.Tensor] = {}
        self._lock = threading.Lock()

    def allocate(self, nbytes: int) -> NvmeExtent | None:
        nbytes = round_up(nbytes, 4 * KiB)
        if self.used + nbytes > self.capacity:
            return None
        self.used += nbytes
        return NvmeExtent(nbytes, ())

    def free(self, extent: NvmeExtent) -> None:
        self.used -= extent.nbytes
        self._data.pop(extent, None)

    def write(self, extent: NvmeExtent, block: torch.Tensor) -> Future[None]:
        self._data[extent] = block.clone()
        return self._start(self.writes)

    def read(self, extent: NvmeExtent, block: torch.Tensor) -> Future[None]:
        block.copy_(self._data[extent])
        return self._start(self.reads)

    def finish(self) -> None:
        """From now on everything ends at once, what is under way included."""
        with self._lock:
            self.at_once = True
            for request in (*self.writes, *self.reads):
                if not request.done():
                    request.set_result(None)

    def _start(self, requests: list[Future[None]]) -> Future[None]:
        request: Future[None] = Future()
        with self._lock:
            if self.at_once:
                request.set_result(None)
            requests.append(request)
        return request
