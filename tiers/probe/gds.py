"""Whether GPU memory can go straight to the directories at hand, by the facts that a run goes by."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch_tiers.allocator.errors import StoreError
from torch_tiers.allocator.nvme.choose import gpu_in_use, prepare_cufile
from torch_tiers.allocator.nvme.decide import decide
from torch_tiers.allocator.nvme.kvikio import KvikioFile
from torch_tiers.allocator.nvme.ways import closed, obstacles


def gds_obstacle(directories: Sequence[Path]) -> str | None:
    """Say why GPU memory cannot go straight to files in `directories`, or return None; opens one in each."""
    gpu = gpu_in_use()
    decision = decide(directories, "prefer", None, gpu, measuring=None)
    of_each = [closed(decided.possible) for decided in decision.directories.values()]
    for why in of_each or [closed(obstacles(decision.machine))]:
        if why is not None:
            return f"{why.reason}; {why.change}" if why.change else why.reason
    prepare_cufile(decide(directories, "require", None, gpu, measuring=None))
    for directory in directories:
        try:
            KvikioFile(directory, mode="gds").close()
        except (StoreError, ImportError) as error:
            return str(error)
    return None
