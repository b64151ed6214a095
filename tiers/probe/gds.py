"""Whether GPU memory goes straight to the directories at hand, decided as a run decides it."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from torch_tiers.allocator.errors import StoreError
from torch_tiers.allocator.nvme.choose import foresee, prepare_cufile
from torch_tiers.allocator.nvme.kvikio import KvikioFile
from torch_tiers.allocator.nvme.ways import Gds
from torch_tiers.places import cache_directory


@cache  # a cache directory that cannot be written to would have each path measured anew
def gds_obstacle(directories: tuple[Path, ...], gds: Gds) -> str | None:
    """Say why a run does not take GPU memory straight to `directories`, or return None; opens a file in each."""
    decision = foresee(directories, gds, cache_directory())
    if decision.obstacle is not None:
        return str(decision.obstacle)
    if not directories:
        return "no directory is named"
    prepare_cufile(decision)
    for directory in directories:
        try:
            KvikioFile(directory, mode="gds").close()
        except (StoreError, ImportError) as error:
            return str(error)
    return None
