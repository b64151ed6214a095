"""The C++ part of the hooks, built for the torch that is installed: what `migrator.saved.tensors` describes."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import cast

from torch_tiers.allocator.extensions.extension_module import ExtensionModule
from torch_tiers.migrator.saved.tensors import HookTensors

_HERE = Path(__file__).parent

MODULE = ExtensionModule(
    name=f"{__name__}.tensors",
    title="the C++ part of the hooks",
    source=_HERE / "tensors.cpp",
    headers=tuple(sorted(_HERE.glob("*.h"))),
)


@cache
def load(library: Path) -> HookTensors:
    """The module in a library.

    Raises
    ------
    CannotBuild
        If it does not load.
    """
    return cast("HookTensors", MODULE.load(library))
