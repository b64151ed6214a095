"""The allocator's native core: C++ that maps pages, hands out blocks, and follows the layout of a step.

`core.h` is its plain C interface. `binding` declares that for ctypes, and `core` wraps it in `Core`. The C++ is tested
without a GPU: `driver/` has what it needs of CUDA, and a second implementation on anonymous files.
"""

from torch_tiers.allocator.native.binding import (
    BLOCK,
    DRAM,
    FREE,
    HBM,
    LIBRARY,
    PARTS,
    PENDING_FREE,
    PERIODS,
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
from torch_tiers.allocator.native.core import Core, Counts, is_off_sequence, off_sequence

__all__ = [
    "BLOCK",
    "DRAM",
    "FREE",
    "HBM",
    "PENDING_FREE",
    "LIBRARY",
    "PARTS",
    "PERIODS",
    "REQUEST",
    "STATE",
    "USED",
    "Core",
    "CoreBusy",
    "CoreError",
    "CoreFull",
    "Counts",
    "Glance",
    "off_sequence",
    "checked",
    "is_off_sequence",
    "library",
]
