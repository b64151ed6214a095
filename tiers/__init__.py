"""Runs PyTorch programs in less GPU memory than they need.

The names below are handed out lazily: `import torch` imports this package for its entry point, and that must
cost nothing while the gate is off.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiers.config import Config, ConfigError, load
    from tiers.session import session

__all__ = ["session", "load", "Config", "ConfigError", "__version__"]

_HOME = {
    "session": "tiers.session",
    "load": "tiers.config",
    "Config": "tiers.config",
    "ConfigError": "tiers.config",
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
    `from tiers.session import ...` anywhere would turn `tiers.session(...)` into a call of a module.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if name == "session" and isinstance(value, ModuleType):
            value = value.session
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
