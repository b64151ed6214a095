"""What a run leaves in its stats.json, with everything that one can tell."""

from __future__ import annotations

from typing import Any

from torch_tiers.allocator.sizes import GiB

LANES = {"d2h": 40 * GiB, "h2d": 40 * GiB}
SETTLED = {"median": 0.5, "low": 0.45, "high": 0.6, "steps": 5}
STATS: dict[str, Any] = {
    "device": "cuda:0",
    "allocator": "torch",
    "policy": "auto",
    "budget": {"hbm": 20 * GiB, "dram": None, "nvme": 0},
    "iterations": 10,
    "steps": 10,
    "peak": {"hbm": 15 * GiB, "dram": 4 * GiB, "nvme": 0},
    "moved": LANES,
    "groups": 120,
    "stalls": {"d2h": {"count": 3, "seconds": 0.25}},
    "settled": {"iterations": 5, "moved": LANES, "stalled_s": {"d2h": 0.1}},
    "unmanaged_bytes": 512,
    "flushes": 1,
    "pages": dict.fromkeys(("planned", "mispredicted", "misplaced", "maps", "unmaps", "waits", "dram"), 1),
    "step_s": {"median": 0.5, "min": 0.4, "max": 0.75, "settled": SETTLED},
    "monitor": {"sensors": ["copies"], "steps": 10, "backed_off": 3, "changes": ["memory bus saturated by others"]},
}
