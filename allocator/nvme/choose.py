"""Opens the files of a store, by the way that was decided on for each directory."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from torch_tiers.allocator.errors import StoreError, TiersError
from torch_tiers.allocator.nvme.backend import Backend
from torch_tiers.allocator.nvme.decide import Decision, Measuring, decide
from torch_tiers.allocator.nvme.facts import P2PDMA_VARIABLE, Machine, Place
from torch_tiers.allocator.nvme.files import several
from torch_tiers.allocator.nvme.kvikio import KvikioFile
from torch_tiers.allocator.nvme.posix import PosixFile
from torch_tiers.allocator.nvme.speeds import speeds
from torch_tiers.allocator.nvme.ways import Gds as Gds
from torch_tiers.allocator.nvme.ways import Measured, Obstacle, Way

log = logging.getLogger("tiers")

_said: set[str] = set()


class Opener:
    """Opens the file of each directory by the way decided on; the `backend` argument of `NvmeStore`.

    Attributes
    ----------
    decision : Decision
        The one given; once cuFile has refused a file, that all directories go through host memory.
    """

    def __init__(self, decision: Decision, gds: Gds) -> None:
        self.decision = decision
        self._gds = gds

    def __call__(self, directory: Path) -> Backend:
        """Open the file. If cuFile refuses it after all, and is not required, open it without."""
        if not self.decision.directories[directory].choice.direct:
            return several(PosixFile)(directory)
        try:
            return several(partial(KvikioFile, mode="gds"))(directory)
        except (StoreError, ImportError) as error:
            if self._gds == "require":
                raise
            self.decision = self.decision.closed_by(Obstacle(str(error)))
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
    """Decide as a run would, and open a file in each directory as it would; the result names the obstacle, if any.

    Where a run with ``"require"`` would raise, this decides by ``"prefer"`` instead. It starts CUDA, and may measure.

    Parameters
    ----------
    cache, host_alone
        As `decide` takes them.
    """
    try:
        gpu = gpu_in_use()
    except RuntimeError as error:  # the GPU is full, or another process has it exclusively: doctor is to answer still
        log.warning("CUDA does not start: %s", error)
        gpu = None
    # Decided twice, it is measured once, also where the cache cannot be written.
    measured: dict[tuple[Path, tuple[Way, ...]], Mapping[Way, Measured]] = {}

    def once(ways: Sequence[Way], machine: Machine, place: Place, cache: Path | None) -> Mapping[Way, Measured]:
        key = place.path, tuple(ways)
        if key not in measured:
            measured[key] = speeds(ways, machine, place, cache)
        return measured[key]

    decided = partial(decide, directories, cache=cache, gpu=gpu, measuring=once, host_alone=host_alone)
    try:
        decision = decided(gds)
    except TiersError:
        decision = decided("prefer")
    if decision.direct:
        prepare_cufile(decision)
        opener = Opener(decision, "prefer")
        for directory in directories:
            opener(directory).close()
        return opener.decision
    return decision


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
