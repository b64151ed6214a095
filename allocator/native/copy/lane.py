"""Copies and events through the CUDA driver, each in one call of C++: the Python side of ``lane.cpp``."""

from __future__ import annotations

import ctypes
import logging
import os
from array import array
from collections.abc import Sequence
from ctypes import POINTER, byref, c_char_p, c_float, c_int, c_uint64, c_void_p
from pathlib import Path
from typing import Any, TypeAlias

from torch_tiers.allocator.errors import TiersError

LIBRARY = Path(__file__).with_name("libtiers_lane.so")
"""Where the build puts it. By hand: ``g++ -std=c++17 -O2 -shared -fPIC lane*.cpp -o libtiers_lane.so -ldl``."""

TURN = 32 << 20
"""Bytes that one stream of a lane copies before the other takes its turn: 0.6 ms on a link of 55 GB/s."""

NOT_READY = 600

log = logging.getLogger("tiers")

Spans: TypeAlias = "array[int]"
"""An ``array("Q")`` of three numbers a span: address to copy to, address to copy from, bytes."""


class NoLane(TiersError):
    """Nothing can be copied to or from a GPU here; the text says what is missing."""


class DriverError(RuntimeError):
    """The CUDA driver refused a call, or reports that work before it failed."""


class Event:
    """A CUDA event: a point in the order of a stream. Its handle returns to a pool when it is collected."""

    __slots__ = ("_library", "device", "handle")
    timed = False

    def __init__(self, library: Library, device: int, handle: int) -> None:
        self._library = library
        self.device = device
        self.handle = handle

    def __del__(self) -> None:
        self._library.release(self.device, self.handle, self.timed)

    def query(self) -> bool:
        """Whether it has been passed."""
        error = self._library.query(self.device, self.handle)
        if error == NOT_READY:
            return False
        self._library.check(error)
        return True

    def synchronize(self) -> None:
        """Block the host until it has been passed."""
        self._library.check(self._library.synchronize(self.device, self.handle))


class TimedEvent(Event):
    """An event that records the time at which it was passed, which delays the stream by 1 us or more."""

    __slots__ = ()
    timed = True

    def elapsed_time(self, end: TimedEvent) -> float:
        """Milliseconds from this one to another; both must have been passed."""
        milliseconds = c_float()
        self._library.check(self._library.elapsed(self.device, self.handle, end.handle, byref(milliseconds)))
        return milliseconds.value


class Lane:
    """Two streams of the driver that take turns: between two turns a program's own copies are carried out."""

    __slots__ = ("_library", "_process", "device", "handle")

    def __init__(self, library: Library, device: int, handle: int) -> None:
        self._library = library
        self._process = os.getpid()
        self.device = device
        self.handle = handle

    def __del__(self) -> None:
        if os.getpid() == self._process:  # a child that was forked makes no call of the driver
            self._library.close(self.handle)

    def synchronize(self) -> None:
        """Block the host until all its copies are done; not while another thread adds copies."""
        self._library.check(self._library.synchronize_lane(self.handle))


class Library:
    """The functions of the library, with their types. Streams are the driver's handles, devices PyTorch's indices."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        self.available = bool(library.tiers_lane_available())
        self._refused = c_int.in_dll(library, "tiers_batch_refused")
        self.query = library.tiers_event_query
        self.query.argtypes = (c_int, c_void_p)
        self.synchronize = library.tiers_event_synchronize
        self.synchronize.argtypes = (c_int, c_void_p)
        self.elapsed = library.tiers_event_elapsed
        self.elapsed.argtypes = (c_int, c_void_p, c_void_p, POINTER(c_float))
        self.release = library.tiers_event_release
        self.release.argtypes = (c_int, c_void_p, c_int)
        self.release.restype = None
        self._error_name = library.tiers_error_name
        self._error_name.argtypes = (c_int,)
        self._error_name.restype = c_char_p
        self._wait = library.tiers_stream_wait
        self._wait.argtypes = (c_int, c_void_p, c_void_p)
        self._record = library.tiers_event_record
        self._record.argtypes = (c_int, c_void_p, POINTER(c_void_p))
        self._follow = library.tiers_stream_follow
        self._follow.argtypes = (c_int, c_void_p, c_void_p, POINTER(c_void_p), POINTER(c_void_p))
        self._open = library.tiers_lane_open
        self._open.argtypes = (c_int, c_uint64, POINTER(c_void_p))
        self.close = library.tiers_lane_close
        self.close.argtypes = (c_void_p,)
        self.close.restype = None
        self.synchronize_lane = library.tiers_lane_synchronize
        self.synchronize_lane.argtypes = (c_void_p,)
        self._copy = library.tiers_copy
        self._copy.argtypes = (
            c_void_p,
            c_int,
            c_void_p,
            c_int,
            POINTER(c_void_p),
            POINTER(c_void_p),
            POINTER(c_void_p),
            POINTER(c_void_p),
        )

    def check(self, error: int) -> None:
        """Raise DriverError unless it is 0."""
        if error:
            name = self._error_name(error).decode()
            raise DriverError(
                f"the CUDA driver answered with error {error} ({name}). If a kernel failed before, the driver "
                "says so in whatever is called next: CUDA_LAUNCH_BLOCKING=1 shows where"
            )

    def record(self, device: int, stream: int) -> TimedEvent:
        """The end of everything that `stream` was given so far."""
        handle = c_void_p()
        self.check(self._record(device, stream, byref(handle)))
        return TimedEvent(self, device, handle.value or 0)

    def wait(self, device: int, stream: int, event: Event) -> None:
        """Let `stream` go on only after `event`."""
        self.check(self._wait(device, stream, event.handle))

    def follow(self, device: int, stream: int, event: Event) -> tuple[TimedEvent, TimedEvent] | None:
        """Let `stream` go on only after `event`; when it got there and when it went on, or None if that was passed."""
        reached, on = c_void_p(), c_void_p()
        self.check(self._follow(device, stream, event.handle, byref(reached), byref(on)))
        if reached.value is None:
            return None
        return TimedEvent(self, device, reached.value), TimedEvent(self, device, on.value or 0)

    def open(self, device: int, turn: int = TURN) -> Lane:
        """A new lane of a device, with turns of so many bytes."""
        handle = c_void_p()
        self.check(self._open(device, turn, byref(handle)))
        return Lane(self, device, handle.value or 0)

    def copy(self, lane: Lane, spans: Spans, after: Sequence[Event], behind: int | None = None) -> Event:
        """Copy every span on `lane`, by one thread at a time; the event says when it is done.

        Once all of `after` have been passed, and all that the stream `behind` was given so far.

        Raises
        ------
        DriverError
            None of the spans is being copied any more then.
        """
        done = c_void_p()
        self._submit(lane, spans, after, behind, None, byref(done))
        return Event(self, lane.device, done.value or 0)

    def timed_copy(
        self, lane: Lane, spans: Spans, after: Sequence[Event], behind: int | None = None
    ) -> tuple[TimedEvent, TimedEvent]:
        """`copy`, and when it began: an event between the waits and the copies."""
        begin, done = c_void_p(), c_void_p()
        self._submit(lane, spans, after, behind, byref(begin), byref(done))
        return TimedEvent(self, lane.device, begin.value or 0), TimedEvent(self, lane.device, done.value or 0)

    def _submit(
        self, lane: Lane, spans: Spans, after: Sequence[Event], behind: int | None, begin: Any, done: Any
    ) -> None:
        address, length = spans.buffer_info()
        events = (c_void_p * len(after))(*[event.handle for event in after])
        stream = None if behind is None else byref(c_void_p(behind))
        self.check(self._copy(lane.handle, length // 3, address, len(after), events, stream, begin, done))
        if self._refused.value > 0:
            text = "the CUDA driver refused several copies in one call with error %d: a call each takes 3 us longer"
            log.warning(text, self._refused.value)
            self._refused.value = -1  # said, for all of the process


def load(path: Path = LIBRARY) -> Library:
    """The library.

    Raises
    ------
    NoLane
        If it was not built, or there is no driver.
    """
    try:
        library = Library(path)
    except OSError as error:
        raise NoLane(
            f"the native library for copies cannot be loaded ({error}): torch-tiers was installed where there was no "
            "C++ compiler; install it again where one is, or run without tiers"
        ) from error
    if not library.available:
        raise NoLane("libcuda.so.1 was not found, or lacks what copies need: install NVIDIA's driver, or a newer one")
    return library
