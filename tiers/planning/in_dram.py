"""What of a run lay in DRAM in its steps, so that nobody saw what they take without that. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch_tiers.allocator.overflow import is_slight
from torch_tiers.allocator.sizes import format_size


def read_in_dram(stats: Mapping[str, Any]) -> str:
    """Return what operators read and wrote in host memory in each step, in words; empty if it was next to nothing.

    All times that were recorded have that in them. Weights that are streamed do not count, nor does state that is: the
    time for them is known.
    """
    # Earlier versions tell of no state in place, and streamed none.
    return _in_words(stats.get("state_in_place", stats.get("state_in_dram", 0)), stats)


def lay_below_hbm(stats: Mapping[str, Any]) -> str:
    """Return the same with state that was streamed, from NVMe, too: with another budget, other parts would be."""
    return _in_words(stats.get("state_in_dram", 0) + stats.get("state_on_nvme", 0), stats)


def _in_words(state: int, stats: Mapping[str, Any]) -> str:
    overflow = stats.get("overflow", 0)  # of which earlier versions did not tell
    if not (state or overflow) or is_slight(state + overflow, stats["budget"]["hbm"]):
        return ""
    parts = [f"{format_size(state)} of optimizer state"] if state else []
    parts += [f"{format_size(overflow)} that hbm had no room for"] if overflow else []
    return " and ".join(parts)
