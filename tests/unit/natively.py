"""The C++ part of the hooks, for tests that drive what is above it by hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from unittest import mock

from torch_tiers.migrator.saved import native
from torch_tiers.migrator.saved.tensors import HookTensors
from torch_tiers.places import cache_directory


@cache
def built() -> HookTensors:
    """Return it; built once, and kept where a program would find it."""
    return native.load(native.MODULE.build(cache_directory()))


@contextmanager
def without_shortcut() -> Iterator[None]:
    """Have PyTorch call the hooks in Python for every tensor, in sessions that open meanwhile."""
    with mock.patch.object(built(), "hooks", lambda saver, place, least: (saver.pack, saver.unpack)):
        yield
