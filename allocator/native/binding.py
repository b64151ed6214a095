"""The native library's C interface (`core.h`), declared for ctypes: functions, structures and errors."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from torch_tiers.allocator.errors import TiersError

LIBRARY = Path(__file__).with_name("libtiers_core.so")
U64, P64 = ctypes.c_uint64, ctypes.POINTER(ctypes.c_uint64)

HBM, DRAM = 0, 1
PARTS, PERIODS = 0, 1
FREE, USED, PENDING_FREE = 1, 2, 3
STATE = 1
"""Enumerations of `core.h`: tiers, peaks, kinds of blocks, the class of blocks that live as long as the program."""

REQUEST = np.dtype([("bytes", "u8"), ("stream", "u8"), ("birth", "i8"), ("death", "i8"), ("class", "i8")])
"""One request of a period's log: rounded bytes, the events of its birth and death (-1: alive), and its class."""

BLOCK = np.dtype(
    [
        ("address", "u8"),
        ("bytes", "u8"),
        ("requested", "u8"),
        ("stream", "u8"),
        ("pool", "u8"),
        ("kind", "i4"),
        ("tier", "i4"),
        ("segment", "u8"),
        ("class", "i8"),
    ]
)
"""One mapped block."""


class CoreError(TiersError):
    """The core could not do what was asked; the text says which call of the driver failed."""


class CoreFull(CoreError):
    """No tier that the device can address has room."""


class CoreBusy(CoreError):
    """A stream is being captured into a graph, so the core cannot wait for it: nothing was done."""


_FAILURES: dict[int, type[CoreError]] = {1: CoreFull, 4: CoreBusy}


class _Stat(ctypes.Structure):
    _fields_: ClassVar[list[Any]] = [(name, ctypes.c_int64) for name in ("current", "peak", "gained", "lost")]


_BY_SIZE = ("allocations", "allocated", "requested", "active", "active_blocks")
PLAIN = (
    "hbm_bytes",
    "hbm_peak",
    "dram_bytes",
    "dram_peak",
    "hbm_limit",
    "dram_limit",
    "demoted_bytes",
    "idle_bytes",
    "largest_idle",
    "maps",
    "unmaps",
    "waits",
    "retries",
    "failures",
    "planned",
    "mispredicted",
    "misplaced",
)
"""What `Stats` has once, whatever the size of a block."""


class Stats(ctypes.Structure):
    """All counters of the core: five by size of block (all, small, large), and plain ones."""

    _fields_: ClassVar[list[Any]] = [
        *((name, _Stat * 3) for name in _BY_SIZE),
        *((name, ctypes.c_int64) for name in PLAIN),
    ]


class Glance(ctypes.Structure):
    """The few counters that are read after every period.

    Attributes
    ----------
    mispredicted : int
        Requests so far that were not as laid out, or whose place was taken.
    dram, dram_state : int
        Bytes of physical pages, and of those that state has a part of.
    present : int
        The number of the laid-out sequence that came last.
    came : int
        How many of that sequence's requests had come when the last period ended.
    requests : int
        Requests of the period under way, so far.
    repeated : int
        Whether the last period had the same requests, at the same events, as the one before it.
    spilled, spilled_so_far : int
        The most bytes for which there was no room in HBM, in the last period, and in the one under way since anything
        was moved: in use in DRAM, without state and what was moved, and of pages that others took from the layout.
    """

    mispredicted: int
    dram: int
    dram_state: int
    present: int
    came: int
    requests: int
    repeated: int
    spilled: int
    spilled_so_far: int
    _fields_: ClassVar[list[Any]] = [
        (name, ctypes.c_int64)
        for name in (
            *("mispredicted", "dram", "dram_state", "present", "came", "requests", "repeated"),
            *("spilled", "spilled_so_far"),
        )
    ]


@cache
def library(path: Path = LIBRARY) -> ctypes.CDLL:
    """The core's shared library.

    Raises
    ------
    CoreError
        If it was not built.
    """
    try:
        core = ctypes.CDLL(str(path))
    except OSError as error:
        raise CoreError(
            f"the native core cannot be loaded ({error}): install the package again where a C++ compiler is"
        ) from error
    core.tn_last_error.restype = ctypes.c_char_p
    for name in ("log", "blocks", "on", "pages_on", "pool_used", "take_peak", "retries", "delayed", "page_bytes"):
        getattr(core, f"tn_{name}").restype = U64
    core.tn_open.argtypes = [ctypes.c_char_p, ctypes.c_int, U64, U64, ctypes.POINTER(ctypes.c_void_p)]
    core.tn_allocate.argtypes = [ctypes.c_void_p, U64, U64, U64, P64]
    core.tn_pack.argtypes = [U64, *[ctypes.c_void_p] * 3, ctypes.c_int64, U64, ctypes.c_void_p, P64]
    core.tn_off_sequence.argtypes = [ctypes.c_int]
    others: dict[str, list[Any]] = {
        "tn_close": [],
        "tn_free": [U64],
        "tn_used_on": [U64, U64],
        "tn_block_of": [U64, P64, P64],
        "tn_pool_retire": [U64],
        "tn_pool_used": [U64],
        "tn_pool_clear": [U64],
        "tn_allocate_at": [U64, U64, U64],
        "tn_capture": [ctypes.c_int],
        "tn_class": [ctypes.c_int, U64],
        "tn_limit": [ctypes.c_int, U64],
        "tn_trim": [U64],
        "tn_trim_outside": [],
        "tn_share": [ctypes.c_int],
        "tn_mark": [ctypes.POINTER(Glance)],
        "tn_log": [ctypes.c_int, ctypes.c_void_p, U64, P64],
        "tn_set_layout": [U64, U64, *[ctypes.c_void_p] * 4, U64, ctypes.c_void_p],
        "tn_forget_layout": [U64],
        "tn_wait_to_move": [U64, ctypes.c_int],
        "tn_on": [U64, ctypes.c_int],
        "tn_pages_on": [U64, U64, ctypes.c_int],
        "tn_get_stats": [ctypes.POINTER(Stats)],
        "tn_get_glance": [ctypes.POINTER(Glance)],
        "tn_retries": [],
        "tn_delayed": [],
        "tn_page_bytes": [],
        "tn_reset_peaks": [],
        "tn_take_peak": [ctypes.c_int, ctypes.c_int],
        "tn_blocks": [ctypes.c_void_p, U64],
    }
    for name, types in others.items():
        getattr(core, name).argtypes = [ctypes.c_void_p, *types]
    return core


@cache
def exclusive(path: Path = LIBRARY) -> ctypes.PyDLL:
    """The same, for calls during which no other thread of Python's may run: they keep the interpreter's lock."""
    core = ctypes.PyDLL(str(path))
    core.tn_move.argtypes = [ctypes.c_void_p, U64, ctypes.c_int]
    return core


def checked(status: int) -> None:
    """Raise what a call of the library did not do.

    Raises
    ------
    CoreError
        With the library's own text.
    """
    if status:
        text = library().tn_last_error().decode()
        raise _FAILURES.get(status, CoreError)(text)
