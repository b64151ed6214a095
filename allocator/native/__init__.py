"""The allocator's native core: pages, heaps and the layout of a period, behind a plain C interface."""

from allocator.native.binding import (
    BLOCK,
    LIBRARY,
    REQUEST,
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
    "LIBRARY",
    "REQUEST",
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
