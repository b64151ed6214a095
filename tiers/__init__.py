"""Runs PyTorch programs in less GPU memory than they need.

The names below are handed out lazily: `import torch` imports this package for its entry point, and that must
cost nothing while the gate is off.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if __name__ != "torch_tiers":
    raise ImportError("import torch_tiers: the folder tiers/ is its source and no package of its own")

if TYPE_CHECKING:
    from torch_tiers.config import Config, ConfigError, load
    from torch_tiers.session import session

__all__ = ["session", "load", "Config", "ConfigError", "__version__"]

_HOME = {
    "session": "torch_tiers.session",
    "load": "torch_tiers.config",
    "Config": "torch_tiers.config",
    "ConfigError": "torch_tiers.config",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("torch-tiers")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)


class _Package(ModuleType):
    """The package, on which `session` is always the class.

    The import system binds a submodule as an attribute of its package. Without this, the first
    `from torch_tiers.session import ...` anywhere would turn `tiers.session(...)` into a call of a module.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if name == "session" and isinstance(value, ModuleType):
            value = value.session
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
