"""A core of anonymous files, and the page allocator on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.one_core import OnOneCore
from torch_tiers.allocator.host.ledger import Ledger
from torch_tiers.allocator.native import Core
from torch_tiers.allocator.native.pytorch import adapter
from torch_tiers.allocator.sizes import MiB


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> Iterator[Core]:
    made = Core("memfd", hbm=64 * MiB, dram=0)
    monkeypatch.setattr(adapter, "core_of", lambda library, device: made)
    yield made
    made.close()  # each has terabytes of addresses, of which a process has some 128


@pytest.fixture
def pages(core: Core, tmp_path: Path) -> OnOneCore:
    return OnOneCore(core, 64 * MiB, Ledger(tmp_path / "ledger"))
