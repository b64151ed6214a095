"""The native twin of `migrator.engine.tensors`, built for the torch that is installed."""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path
from typing import cast

from torch_tiers.allocator.extension import CannotBuild
from torch_tiers.allocator.extension_module import ExtensionModule
from torch_tiers.migrator.engine import tensors as in_python
from torch_tiers.migrator.engine.tensors import Tensors

log = logging.getLogger("tiers")

_HERE = Path(__file__).parent

MODULE = ExtensionModule(
    name=f"{__name__}.tensors",
    title="the native part of the hooks",
    source=_HERE / "tensors.cpp",
    headers=tuple(_HERE / name for name in ("dropped.h", "hooks.h", "moved.h", "object.h", "slots.h", "storages.h")),
)


@cache
def load(library: Path) -> Tensors:
    """The module in a library.

    Raises
    ------
    CannotBuild
        If it does not load.
    """
    return cast("Tensors", MODULE.load(library))


def best(cache_dir: Path) -> Tensors:
    """The native twin, or where it cannot be had the module in Python, which is said."""
    try:
        return load(MODULE.build(cache_dir))
    except CannotBuild as missing:
        log.info("%s; the hooks take more of the host's time", missing)
        return in_python
