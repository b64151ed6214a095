"""The native part of the hooks, for the tests that hold it to the one in Python."""

from __future__ import annotations

import pytest

from torch_tiers.migrator.engine import native
from torch_tiers.migrator.engine.tensors import Tensors
from torch_tiers.places import cache_directory

needs_compiler = pytest.mark.skipif(native.MODULE.obstacle() is not None, reason="it cannot be built here")


def built() -> Tensors:
    """Return it; built once, and kept where a program would find it."""
    return native.load(native.MODULE.build(cache_directory()))
