"""Opens the files of a store, by the way that was decided on for each directory."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from torch_tiers.allocator.errors import StoreError, TiersError
from torch_tiers.allocator.nvme.backend import Backend
from torch_tiers.allocator.nvme.decide import Decision, Measuring, decide
from torch_tiers.allocator.nvme.facts import P2PDMA_VARIABLE
from torch_tiers.allocator.nvme.files import several
from torch_tiers.allocator.nvme.kvikio import KvikioFile
from torch_tiers.allocator.nvme.posix import PosixFile
from torch_tiers.allocator.nvme.speeds import speeds
from torch_tiers.allocator.nvme.ways import Gds as Gds
from torch_tiers.allocator.nvme.ways import Obstacle

log = logging.getLogger("tiers")

_said: set[str] = set()


class Opener:
    """Opens the file of each directory by the way decided on; the `backend` argument of `NvmeStore`."""

    def __init__(self, decision: Decision, gds: Gds) -> None:
        self.decision = decision
        self._gds = gds
        self._refused: Obstacle | None = None

    @property
    def obstacle(self) -> Obstacle | None:
        """Why GPU memory does not go straight to all directories: as was decided, or as cuFile refused a file."""
        return self.decision.obstacle or self._refused

    def __call__(self, directory: Path) -> Backend:
        """Open the file. If cuFile refuses it after all, and is not required, open it without."""
        if not self.decision.directories[directory].choice.direct:
            return several(PosixFile)(directory)
        try:
            return several(partial(KvikioFile, mode="gds"))(directory)
        except (StoreError, ImportError) as error:
            if self._gds == "require":
                raise
            self._refused = Obstacle(str(error))
            _say(f"nvme at {directory} goes through host memory: {error}")
            return several(PosixFile)(directory)


def choose_backends(
    directories: Sequence[Path],
    gds: Gds,
    cache: Path | None,
    gpu: str | None,
    measuring: Measuring | None = speeds,
) -> Opener:
    """Decide for the directories of a store, log the decision once, and set cuFile up; cuFile must not have started.

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


def foresee(directories: Sequence[Path], gds: Gds, cache: Path | None, *, host_alone: bool = False) -> Decision:
    """What a run decides for the directories; where it refuses, what keeps it from a direct way.

    Parameters
    ----------
    cache, host_alone
        As `decide` takes them.
    """
    gpu = gpu_in_use()
    try:
        return decide(directories, gds, cache, gpu, measuring=speeds, host_alone=host_alone)
    except TiersError:
        return decide(directories, "prefer", cache, gpu, measuring=speeds, host_alone=host_alone)


def prepare_cufile(decision: Decision) -> None:
    """Set the environment that cuFile reads when it starts in this process."""
    if "p2pdma" in decision.ways:
        os.environ[P2PDMA_VARIABLE] = "true"


def gpu_in_use() -> str | None:
    """The uuid of torch's current GPU; None without one. It starts CUDA."""
    if not torch.cuda.is_available():
        return None
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def choose_backend(gds: Gds) -> Callable[[Path], Backend]:
    """A function that opens a directory's file where no decision was made: by `gds` alone, without a measurement.

    So GPU memory goes directly only where that is required.
    """
    if gds == "off":
        return several(PosixFile)
    return lambda directory: choose_backends([directory], gds, None, gpu_in_use(), None)(directory)


def _say(text: str) -> None:
    if text not in _said:
        _said.add(text)
        log.info(text)
