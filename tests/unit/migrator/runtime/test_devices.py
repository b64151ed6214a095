from __future__ import annotations

import pytest
import torch

from torch_tiers.migrator.runtime.devices import holes

GPU = torch.device("cuda", 0)


@pytest.fixture
def emptied(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("emptied"))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 70)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 100 if calls else 300)
    return calls


def test_holes_are_what_cannot_be_given_back(emptied: list[str]) -> None:
    assert holes(GPU) == 30


def test_nothing_is_given_back_while_a_graph_is_captured(emptied: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert holes(GPU) == 0
    assert not emptied
