"""Loads on the host that run beside training: an input pipeline that decodes JPEGs, and copies at a stated rate.

Each is started once and then switched on and off. Processes are spawned: they must not inherit a CUDA context.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import time
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import pairwise
from multiprocessing.sharedctypes import Synchronized
from statistics import median
from typing import Any, Protocol

import numpy as np

CHUNK = 32 << 20  # bytes of one copy: past the share of a core in any cache
PER_WORKER = 9e9  # bytes per second of traffic that one process of the copies is asked for at most
BATCH = 1  # images: a window of seconds must time them finely
TIMES = 1 << 16  # of the latest images
PIXELS = (1536, 2048)
STARTED_WITHIN = 120.0  # seconds


Span = tuple[float, float]
"""From one time that a load noted to another."""


class Load(Protocol):
    """One load; `unit` says what `rate` counts."""

    name: str
    unit: str

    def switch(self, on: bool) -> None:
        """Begin or pause."""

    def note(self) -> float:
        """Begin or end a span here; the time, in seconds of the monotonic clock."""

    def rate(self, spans: Sequence[Span]) -> float:
        """What was done a second within these spans, taken together; while the load is still on."""

    def close(self) -> None:
        """End its processes."""


class Jpegs:
    """The DataLoader of ``examples/train_resnet.py``: workers decode and augment at full resolution."""

    unit = "images/s"

    def __init__(self, workers: int, pixels: tuple[int, int] = PIXELS) -> None:
        self.name = f"jpeg, {workers} workers"
        self._workers = workers
        context = multiprocessing.get_context("spawn")
        self._on, self._done = context.Value("b", 0), context.Value("q", 0)
        self._times = context.RawArray("d", TIMES)
        self._ready = context.Event()
        self._process = context.Process(
            target=_decode, args=(workers, pixels, self._on, self._done, self._times, self._ready, os.getpid())
        )
        self._process.start()

    def wait(self) -> None:
        """Until the first images are there."""
        if not self._ready.wait(STARTED_WITHIN):
            raise RuntimeError("the DataLoader of the JPEG load did not start")

    def switch(self, on: bool) -> None:
        self._on.value = on

    def note(self) -> float:
        return time.monotonic()

    def rate(self, spans: Sequence[Span]) -> float:
        now, done = time.monotonic(), self._done.value
        times = [self._times[n % TIMES] for n in range(max(0, done - TIMES), done)]
        return images_per_second(times, self._workers, spans, now)

    def close(self) -> None:
        self._on.value = -1
        self._process.join(30)
        if self._process.is_alive():
            self._process.terminate()
            self._process.join()


class Copies:
    """Processes that copy in host memory, together at `rate` bytes per second, read and written."""

    unit = "GB/s"

    def __init__(self, rate: float, most: int) -> None:
        self.name = f"copies at {rate / 1e9:g} GB/s"
        workers = max(1, min(most, round(rate / PER_WORKER + 0.5)))
        context = multiprocessing.get_context("spawn")
        self._on = context.Value("b", 0)
        self._done = context.RawArray("Q", workers)
        self._noted: dict[float, int] = {}  # bytes done, by time
        self._processes = [
            context.Process(target=_copy, args=(index, rate / workers, self._on, self._done, os.getpid()))
            for index in range(workers)
        ]
        for process in self._processes:
            process.start()

    def switch(self, on: bool) -> None:
        self._on.value = on

    def note(self) -> float:
        now = time.monotonic()
        self._noted[now] = sum(self._done)
        return now

    def rate(self, spans: Sequence[Span]) -> float:
        done = sum(self._noted[end] - self._noted[begin] for begin, end in spans)
        return done / 1e9 / sum(end - begin for begin, end in spans)

    def close(self) -> None:
        self._on.value = -1
        for process in self._processes:
            process.join(30)


def images_per_second(times: Sequence[float], workers: int, spans: Sequence[Span], now: float) -> float:
    """How many images come a second within spans, of the times at which they came, in seconds.

    The loader takes one from each worker in turn, and all take about as long: they come in bursts of one each, five or
    six in a span of seconds. To count them would tell 70 or 84. An image counts for what of its making, which is from
    its worker's last one to its own, lies within the spans. 0 where no worker has brought two.
    """
    rates = (_per_second(times[first::workers], spans, now) for first in range(workers))
    known = [rate for rate in rates if rate]
    return workers * median(known) if known else 0.0


def _per_second(times: Sequence[float], spans: Sequence[Span], now: float) -> float:
    """The same of one worker."""
    ends = list(times)
    if len(ends) > 1 and now - ends[-1] > ends[-1] - ends[-2]:
        ends.append(now)  # the one under way takes longer than the one before, and now at the soonest it is there
    images = covered = 0.0
    for begun, came in pairwise(ends):
        for begin, end in spans:
            within = min(end, came) - max(begin, begun)
            if within > 0:
                covered += within
                images += within / (came - begun)
    return images / covered if covered else 0.0


def _copy(index: int, rate: float, on: Synchronized[int], done: Any, parent: int) -> None:
    source, target = np.ones(CHUNK, np.uint8), np.zeros(CHUNK, np.uint8)
    due = 0.0
    while on.value >= 0 and os.getppid() == parent:
        now = time.perf_counter()
        if not on.value:
            time.sleep(0.005)
            due = 0.0
        elif now < due:
            time.sleep(due - now)
        else:
            target[:] = source
            done[index] += 2 * CHUNK
            # Late by more than one copy, as where the bus gives no more: what was missed is not made up for.
            due = max(due, now - 2 * CHUNK / rate) + 2 * CHUNK / rate


def _decode(
    workers: int,
    pixels: tuple[int, int],
    on: Synchronized[int],
    done: Synchronized[int],
    times: Any,
    ready: Any,
    parent: int,
) -> None:
    import torch
    from torch.utils.data import DataLoader

    from examples.train_resnet import Photographs

    torch.set_num_threads(1)
    dataset = Photographs(photographs(pixels), 1 << 40, 224, seed=0)
    loader: DataLoader[Any] = DataLoader(dataset, BATCH, sampler=_Endless(), num_workers=workers)
    for _ in loader:
        ready.set()
        times[done.value % TIMES] = time.monotonic()  # before it counts
        done.value += BATCH
        # The workers stop by themselves when nobody takes what they have made.
        while not on.value and os.getppid() == parent:
            time.sleep(0.005)
        if on.value < 0 or os.getppid() != parent:
            return


class _Endless:
    """Indices without end, and without a list of them."""

    def __iter__(self) -> Any:
        return iter(range(1 << 40))

    def __len__(self) -> int:
        return 1 << 40


def photographs(pixels: tuple[int, int] = PIXELS, count: int = 8) -> list[bytes]:
    """Images of the size of photographs, as JPEGs; without Pillow as plain arrays, which need no decoding."""
    rng = np.random.default_rng(0)
    y, x = np.mgrid[0 : pixels[0], 0 : pixels[1]] / pixels[0]
    encoded = []
    for _ in range(count):
        waves = [np.sin(2 * np.pi * (a * x + b * y)) for a, b in rng.uniform(1, 40, (3, 2))]
        image = np.stack(waves, axis=-1) * 100 + 127 + rng.normal(0, 8, (*pixels, 3))
        pixels8 = np.uint8(np.clip(image, 0, 255))
        file = io.BytesIO()
        if find_spec("PIL") is not None:
            import PIL.Image

            PIL.Image.fromarray(pixels8).save(file, "JPEG", quality=90)
        else:
            np.save(file, pixels8)
        encoded.append(file.getvalue())
    return encoded
