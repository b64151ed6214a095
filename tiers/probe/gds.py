"""Whether GPUDirect Storage can be used with the directories at hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch_tiers.allocator.errors import StoreError
from torch_tiers.allocator.nvme.kvikio import KvikioFile, gds_refusal


def gds_obstacle(directories: Sequence[Path]) -> str | None:
    """Say why GPU memory cannot go straight to files in `directories`, or return None; opens one in each."""
    refusal = gds_refusal()
    if refusal is not None:
        return refusal
    for directory in directories:
        try:
            KvikioFile(directory, mode="gds").close()
        except StoreError as error:
            return str(error)
    return None
