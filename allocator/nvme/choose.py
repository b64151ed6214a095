"""What opens the files of a store, by the ways that were decided on."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from torch_tiers.allocator.errors import StoreError
from torch_tiers.allocator.nvme.backend import Backend
from torch_tiers.allocator.nvme.decide import Decision, Measuring, decide
from torch_tiers.allocator.nvme.facts import P2PDMA_VARIABLE, first_gpu
from torch_tiers.allocator.nvme.files import several
from torch_tiers.allocator.nvme.kvikio import KvikioFile
from torch_tiers.allocator.nvme.posix import PosixFile
from torch_tiers.allocator.nvme.speeds import speeds
from torch_tiers.allocator.nvme.ways import Gds as Gds

log = logging.getLogger("tiers")

_said: set[str] = set()


class Opener:
    """Opens the file of each directory that was decided on; what `NvmeStore` takes as its backend."""

    def __init__(self, decision: Decision, gds: Gds) -> None:
        self.decision = decision
        self._gds = gds

    def __call__(self, directory: Path) -> Backend:
        """Open it; where cuFile refuses after all, as if it were not there, unless it is required."""
        if not self.decision.directories[directory].choice.direct:
            return several(PosixFile)(directory)
        try:
            return several(partial(KvikioFile, mode="gds"))(directory)
        except (StoreError, ImportError) as error:
            if self._gds == "require":
                raise
            _say(f"nvme at {directory} goes through host memory: {error}")
            return several(PosixFile)(directory)


def choose_backends(
    directories: Sequence[Path],
    gds: Gds,
    cache: Path | None,
    gpu: str | None,
    measuring: Measuring | None = speeds,
) -> Opener:
    """Decide for the directories of a store, say so once, and have cuFile, which must not have started, follow.

    Parameters
    ----------
    cache, gpu, measuring
        As `decide` takes them.

    Raises
    ------
    TiersError
        If `gds` is ``"require"`` and a directory has no direct way; says why.
    """
    decision = decide(directories, gds, cache, gpu, measuring=measuring)
    prepare_cufile(decision)
    if gds != "off":
        for path, decided in decision.directories.items():
            _say(f"nvme at {path} goes {decided.describe()}")
    return Opener(decision, gds)


def prepare_cufile(decision: Decision) -> None:
    """Set what cuFile reads when it starts in this process."""
    if "p2pdma" in decision.ways:
        os.environ[P2PDMA_VARIABLE] = "true"


def gpu_in_use() -> str | None:
    """The uuid of torch's current GPU; None without one. It starts CUDA."""
    if not torch.cuda.is_available():
        return None
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def choose_backend(gds: Gds) -> Callable[[Path], Backend]:
    """Return what opens a directory's file where nobody has chosen: as `gds` asks for, and nothing is measured.

    So GPU memory goes straight only where that is required.
    """
    if gds == "off":
        return several(PosixFile)
    gpu = first_gpu() if torch.cuda.is_available() else None
    return lambda directory: choose_backends([directory], gds, None, gpu, None)(directory)


def _say(text: str) -> None:
    if text not in _said:
        _said.add(text)
        log.info(text)
