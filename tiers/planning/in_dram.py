"""What of a run lay in DRAM in its steps, so that nobody saw what they take without that. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch_tiers.allocator.overflow import is_slight
from torch_tiers.allocator.sizes import format_size
from torch_tiers.run_directory import by_iteration


def read_in_dram(stats: Mapping[str, Any]) -> str:
    """Return what operators read and wrote in host memory in each step, in words; empty if it was next to nothing.

    All times that were recorded have that in them. Weights that are streamed do not count, nor does state that comes to
    HBM for its updates: the time for them is known.
    """
    state, overflow = (stats.get(name, 0) for name in ("state_in_dram", "overflow"))  # earlier versions lack them
    state = max(0, state - _streamed(stats))
    if not (state or overflow) or is_slight(state + overflow, stats["budget"]["hbm"]):
        return ""
    parts = [f"{format_size(state)} of optimizer state"] if state else []
    parts += [f"{format_size(overflow)} that hbm had no room for"] if overflow else []
    return " and ".join(parts)


def _streamed(stats: Mapping[str, Any]) -> int:
    """Bytes of optimizer state that came to HBM in a step."""
    if not stats.get("moved", {}).get("state_read"):
        return 0
    return int(by_iteration(stats)[0]["state_read"] * stats["iterations"] / max(stats["steps"], 1))
