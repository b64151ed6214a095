"""Which backend serves under which ``gds`` setting."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

from torch_tiers.allocator.errors import TiersError
from torch_tiers.allocator.nvme.backend import Backend
from torch_tiers.allocator.nvme.kvikio import KvikioFile, gds_refusal, kvikio_refusal
from torch_tiers.allocator.nvme.posix import PosixFile

log = logging.getLogger("tiers")

Gds = Literal["require", "prefer", "off"]


def choose_backend(gds: Gds) -> Callable[[Path], Backend]:
    """Return what opens a directory's file.

    Raises
    ------
    TiersError
        If `gds` is ``"require"`` and GPUDirect Storage cannot be used; says why.
    """
    if gds == "off":
        return PosixFile
    refusal = gds_refusal()
    if refusal is None:
        return partial(KvikioFile, mode="gds" if gds == "require" else "auto")
    if gds == "require":
        raise TiersError(f'nvme.gds = "require" cannot be met ({refusal}); "prefer" works without')
    log.info("nvme runs without GPUDirect Storage: %s", refusal)
    return PosixFile if kvikio_refusal() else partial(KvikioFile, mode="auto")
