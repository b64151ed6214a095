"""The console script, before it is there."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from torch_tiers.cli import entry


def test_control_c_ends_it_without_a_word_while_it_still_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    class Importing(ModuleType):
        def __getattr__(self, name: str) -> None:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "torch_tiers.cli.main", Importing("torch_tiers.cli.main"))
    assert entry.main() == 130
