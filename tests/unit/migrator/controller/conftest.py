from __future__ import annotations

import pytest


@pytest.fixture
def loud(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever moves is a burden to others: these programs move little, and plans that do may stay."""
    monkeypatch.setattr("torch_tiers.migrator.planner.low_traffic.LOW_TRAFFIC", 0.0)
