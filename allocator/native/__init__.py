"""The allocator's native core: pages, heaps and the layout of a period, behind a plain C interface."""

from allocator.native.binding import (
    BLOCK,
    DRAM,
    FREE,
    HBM,
    HELD,
    LIBRARY,
    REQUEST,
    STATE,
    USED,
    CoreBusy,
    CoreError,
    CoreFull,
    Glance,
    checked,
    library,
)
from allocator.native.core import Core, Counts, aside, is_aside

__all__ = [
    "BLOCK",
    "DRAM",
    "FREE",
    "HBM",
    "HELD",
    "LIBRARY",
    "REQUEST",
    "STATE",
    "USED",
    "Core",
    "CoreBusy",
    "CoreError",
    "CoreFull",
    "Counts",
    "Glance",
    "aside",
    "checked",
    "is_aside",
    "library",
]
