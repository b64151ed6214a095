from __future__ import annotations

from itertools import count

import pytest

from torch_tiers.migrator.offload import filling


@pytest.fixture
def every_save_is_an_operation_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is saved here no operation makes."""
    monkeypatch.setattr(filling, "_operation", count().__next__)
