"""Whether GPU memory goes straight to the directories at hand, decided as a run decides it."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from torch_tiers.allocator.nvme.choose import foresee
from torch_tiers.allocator.nvme.ways import Gds
from torch_tiers.places import cache_directory


@cache  # a cache directory that cannot be written to would have each path measured anew
def gds_obstacle(directories: tuple[Path, ...], gds: Gds) -> str | None:
    """Say why a run does not take GPU memory straight to `directories`, or return None."""
    decision = foresee(directories, gds, cache_directory())
    if decision.obstacle is not None:
        return str(decision.obstacle)
    return None if directories else "no directory is named"
